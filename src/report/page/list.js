// The tables and lists of a run.

const newestOf = (shown, all, noun) => (shown < all ? `the newest ${count(shown)} of ${plural(all, noun)}` : "");

function drawUnits() {
  const { rows, total, count: all } = run.units;
  if (!all) {
    byId("units").replaceChildren(
      missing("The log names no units: the model is not sharded, or the run did not list them."));
    return;
  }
  byId("units-note").textContent =
    rows.length < all ? `the first ${count(rows.length)} of ${count(all)}` : `${count(all)}, each gathered as one`;
  const sizes = ([parameters, full, shard]) =>
    [count(parameters), bytes(full), bytes(shard)].map((text) => cell(text, "number"));
  const most = rows.reduce((a, row) => Math.max(a, row[1]), 1);
  showInScroll(byId("units"), table("Units and their sizes", ["unit", "#parameters", "#full", "#shard"], [
    ...rows.map(([name, ...values]) => element("tr", { class: "unit" },
      fill(rowHead(name || "(root)", "mono"), {}, [bar(values[0] / most)]), ...sizes(values))),
    element("tr", { class: "total" }, rowHead("all"), ...sizes(total))]), "Units");
}

function endOf(attempt, isLast) {
  if (attempt.end_reason !== null) return attempt.end_reason || "ended";
  return isLast ? "no end: killed, or still running" : "killed";
}

function drawAttempts() {
  byId("attempts-note").textContent = newestOf(run.attempts.length, run.num_attempts, "attempt");
  byId("attempts").append(...run.attempts.map((attempt, i) => {
    const end = endOf(attempt, i + 1 === run.attempts.length);
    const from = attempt.resumed_step !== null
      ? `resumed at step ${count(attempt.resumed_step)}${attempt.resumed_path ? ` from ${attempt.resumed_path}` : ""}`
      : attempt.start_step ? `began at step ${count(attempt.start_step)}` : "began anew";
    return element("li", { class: attempt.end_reason === "finished" ? "finished" : "" },
      element("p", {}, element("b", {}, `Attempt ${attempt.number}`),
        attempt.world ? ` on ${plural(attempt.world, "rank")}` : "", `: ${end}`),
      ...(attempt.error ? [element("p", { class: "mono" }, attempt.error)] : []),
      element("p", { class: "muted" }, `${from}, reached step ${count(attempt.last_step)} in ${duration(attempt.seconds)}`),
      element("p", { class: "muted" }, moment(attempt.began)));
  }));
}

function drawCheckpoints() {
  if (!run.checkpoints.length) {
    byId("checkpoints").replaceChildren(missing('The log has no checkpoint: no line of kind "checkpoint".'));
    return;
  }
  byId("checkpoints-note").textContent =
    newestOf(run.checkpoints.length, run.num_checkpoints, "checkpoint") || count(run.num_checkpoints);
  const attemptNumber = (index) => {
    const attempt = run.attempts[index - (run.num_attempts - run.attempts.length)];
    return attempt ? String(attempt.number) : "";
  };
  const rows = run.checkpoints.map((checkpoint) => element("tr", { class: "saved" },
    rowHead(count(checkpoint.step), "number"),
    cell(checkpoint.blocked_seconds === null ? "" : brief(checkpoint.blocked_seconds), "number"),
    cell(checkpoint.path, "mono"), cell(attemptNumber(checkpoint.attempt))));
  showInScroll(byId("checkpoints"),
    table("Checkpoints", ["#step", "#blocked", "path", "attempt"], rows), "Checkpoints");
}

function drawSamples() {
  if (!run.samples.length) {
    byId("samples").replaceChildren(missing('The log has no sample: no line of kind "sample".'));
    return;
  }
  byId("samples-note").textContent = newestOf(run.samples.length, run.num_samples, "sample");
  const figures = [...run.samples].reverse().map((sample) => sampleFigure(sample, `after step ${count(sample.step)}`));
  byId("samples").append(...figures.slice(0, 2));
  if (figures.length > 2) {
    const title = element("summary", {}, `${count(figures.length - 2)} earlier`);
    byId("samples").append(element("details", {}, title, ...figures.slice(2)));
  }
}

function drawConfig() {
  if (!run.config.length) {
    byId("config").replaceChildren(
      missing('The log has no configuration: no line of kind "start" has a "config".'));
    return;
  }
  if (run.num_attempts > 1) byId("config-note").textContent = "of the last attempt";
  const rows = run.config.map(([name, value, was]) => element("tr", {}, rowHead(name, "mono"),
    element("td", { class: "mono" }, value,
      ...(was === null ? [] : [element("span", { class: "was" }, `  (before: ${was})`)]))));
  showInScroll(byId("config"), table("Configuration", ["name", "value"], rows), "Configuration");
}
