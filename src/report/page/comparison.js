// The page that compares several runs. Each has a colour and dashes of its own, by its number.

const { runs } = data;

const toneOf = (i) => `run-${i}`;

const runHead = (i) => [lineSwatch(toneOf(i)), element("span", { class: "run-name" }, runs[i].label)];

function drawHead() {
  const title = `Comparison of ${plural(runs.length, "run")}`;
  document.title = title;
  byId("name").textContent = title;
  const lines = runs.reduce((sum, { problems }) => sum + problems.lines, 0);
  byId("footer").textContent = `Made from ${plural(lines, "line")} of ${runs.length} logs.`;
  showProblems(byId("problems"), runs.filter(({ problems }) => problems.count)
    .map(({ label, problems }) => problemsBox(problems, `the log of ${label}`)));
}

function runCard(run, i) {
  const pill = element("span", { class: "pill" });
  showState(pill, run.summary);
  return element("article", { class: "card run-card" },
    element("h2", { class: "run-head" }, ...runHead(i), pill),
    element("p", { class: "mono muted" }, run.folder),
    ...(run.error ? [element("p", { class: "mono error" }, run.error)] : []),
    element("dl", { class: "run-tiles" }, ...tilesOf(run).map(([name, title, value, more]) =>
      element("div", { "data-key": name }, element("dt", { class: "title" }, title),
        element("dd", { class: "value" }, value), element("dd", { class: "more" }, more)))));
}

// ---- Curves -----------------------------------------------------------------

function drawCurves() {
  const cursor = new Cursor(false);
  const range = stepRange(runs.flatMap(curvesOf));
  const restarts = runs.flatMap((run, i) => restartsOf(run, range, { tone: toneOf(i), owner: run.label }));
  const common = { range, restarts, checkpoints: [], namesRestarts: false, log: "The logs have" };
  const charts = [...CURVES, {
    id: "memory", key: "memory", label: "Memory per rank", field: "memory", wants: '"memory"', fromZero: true,
    format: bytes, ticks: byteTexts, height: 240 }].map((spec) => curveChart(
    { ...spec, namesRestarts: false }, runs.map((run, i) => seriesOf(run, i, spec)), common, cursor));
  addControls(byId("controls"), charts, range);
  drawLegend(charts.filter(Boolean), restarts);
}

function seriesOf(run, i, { key: name, isSmoothed }) {
  const dots = name === "loss" && run.evals.steps.length ? run.evals : null;
  return {
    name: run.label, tone: toneOf(i), curve: run[name], isSmoothed, dots, dotName: "evaluation", dotTone: toneOf(i) };
}

// A button for each run, which hides it and shows it again, in all charts.
function drawLegend(charts, restarts) {
  byId("runs").append(...runs.map((_, i) => {
    const button = element("button", { type: "button", class: "run-button", "aria-pressed": true }, ...runHead(i));
    button.addEventListener("click", () => {
      const isHidden = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", !isHidden);
      for (const chart of charts) {
        chart.spec.series[i].isHidden = isHidden;
        chart.draw();
      }
    });
    return button;
  }));
  const hasDots = runs.some(({ evals }) => evals.steps.length);
  byId("loss-legend").append(
    key("line", "plain", "training, smoothed; raw behind"),
    ...(hasDots ? [key("dot", "plain", "evaluation")] : []), ...markKeys(runs, restarts, "plain"));
}

// ---- Settings and samples ------------------------------------------------------

function settingsTable(caption, settings) {
  const rows = settings.map(({ name, values }) => element("tr", {}, rowHead(name, "mono"),
    ...values.map((value) => (value === null ? cell("not set", "muted") : cell(value, "mono")))));
  const content = table(caption, ["setting", ...runs.map(() => "")], rows);
  [...content.querySelectorAll("thead th")].slice(1).forEach((head, i) => head.append(...runHead(i)));
  return content;
}

function drawSettings() {
  const different = data.settings.filter(({ differs }) => differs);
  const equal = data.settings.filter(({ differs }) => !differs);
  if (different.length) showInScroll(byId("settings"), settingsTable("Settings that differ", different), "Settings that differ");
  else byId("settings").append(missing(equal.length ? "No setting differs." : "The logs have no settings."));
  if (!equal.length) return;
  byId("settings-note").textContent = `${count(different.length)} of ${count(data.settings.length)}`;
  const box = element("div", { class: "scroll" });
  const rows = equal.map(({ name, values }) => element("tr", {}, rowHead(name, "mono"), cell(values[0], "mono")));
  showInScroll(box, table("Settings that all runs share", ["setting", "value"], rows), "Settings that all runs share");
  byId("equal-settings").append(
    element("details", {}, element("summary", {}, `${plural(equal.length, "setting")} that all runs share`), box));
}

function drawSamples() {
  const figures = runs.filter(({ sample }) => sample).map(({ label, sample }) =>
    sampleFigure(sample, `${label}, after step ${count(sample.step)}`));
  byId("samples").append(...(figures.length
    ? figures : [missing('The logs have no sample: no line of kind "sample".')]));
}

drawHead();
byId("run-cards").append(...runs.map(runCard));
drawCurves();
drawSettings();
drawSamples();
