// The page of one run.

const run = data;

function drawHead() {
  const { facts } = run;
  const name = facts.name || "Training run";
  document.title = `${name}: training report`;
  byId("name").textContent = name;
  showState(byId("state"), run.summary);
  byId("subtitle").textContent = run.attempts.at(-1).end_reason === null
    ? "Training report. The log has no end: the run was killed, or is still going on." : "Training report";
  const rows = [
    ["device", facts.device], ["host", facts.host], ...facts.versions,
    ["began", moment(facts.began)], ["last line", moment(facts.last_seen)]];
  byId("facts").append(...rows.filter(([, value]) => value).map(([title, value]) =>
    element("div", {}, element("dt", {}, title), element("dd", {}, value))));
}

function drawProblems() {
  const { count: all, lines, torn } = run.problems;
  const cut = torn ? ` ${plural(torn, "line")} cut off by a kill.` : "";
  byId("footer").textContent = `Made from ${plural(lines, "line")} of log.jsonl.${cut}`;
  showProblems(byId("problems"), all ? [problemsBox(run.problems, "the log")] : []);
}

function drawTiles() {
  byId("tiles").append(...tilesOf(run).map(([name, title, value, more]) =>
    element("div", { class: "tile", "data-key": name },
      element("dt", { class: "title" }, title), element("dd", { class: "value" }, value),
      element("dd", { class: "more" }, more))));
}

function lossSeries() {
  const hasDots = run.evals.steps.length > 0;
  if (hasDots && !run.loss.steps.length) {
    return { name: "eval loss", tone: "evaluation", curve: run.evals, isSmoothed: false };
  }
  return {
    name: "loss", tone: "accent", curve: run.loss, isSmoothed: true, dots: hasDots ? run.evals : null, dotName: "eval loss",
    dotTone: "evaluation" };
}

function drawLegend(restarts) {
  const legend = run.loss.steps.length ? [key("line", "accent", "training, smoothed; raw behind")] : [];
  if (run.evals.steps.length) legend.push(key("dot", "evaluation", "evaluation"));
  legend.push(...markKeys([run], restarts, "accent"));
  if (run.checkpoint_marks.length) legend.push(key("checkpoint", "", "checkpoint"));
  byId("loss-legend").append(...legend);
}

function drawCurves() {
  const cursor = new Cursor(true);
  const range = stepRange(curvesOf(run));
  const restarts = restartsOf(run, range);
  const common = { range, restarts, checkpoints: run.checkpoint_marks };
  const charts = CURVES.map((spec) => curveChart(spec, [spec.key === "loss" ? lossSeries() : {
    name: spec.label.toLowerCase(), tone: "accent", curve: run[spec.key], isSmoothed: spec.isSmoothed }], common, cursor));
  drawMemory(common, cursor);
  addControls(byId("controls"), charts, range);
  if (charts[0]) drawLegend(restarts);
}

function drawMemory(common, cursor) {
  const { steps, kinds } = run.memory;
  if (!steps.length) {
    byId("memory").replaceChildren(missing('The log has no memory: its lines of kind "step" have no "memory".'));
    return;
  }
  byId("memory-legend").append(...kinds.map((kind, i) => {
    const most = kind.values.reduce((a, b) => Math.max(a, b), 0);
    return key("", `kind-${i}`, `${kind.name} ${bytes(most)}`);
  }));
  cursor.add(new Chart(byId("memory"), {
    label: "Memory per rank", kinds, places: steps, height: 280, ticks: byteTexts, fromZero: true, ...common }, cursor));
}

drawHead();
drawProblems();
drawTiles();
drawCurves();
drawTimelines();
drawUnits();
drawAttempts();
drawCheckpoints();
drawSamples();
drawConfig();
