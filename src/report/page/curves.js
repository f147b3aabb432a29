// The curves that a run has: which there are, their charts, and what is marked on them.

const CURVES = [
  { id: "loss", key: "loss", label: "Loss", field: "loss", wants: '"loss"', height: 330, isSmoothed: true, namesRestarts: true },
  { id: "lr", key: "lr", label: "Learning rate", field: "learning rate", wants: '"lr"', height: 160, fromZero: true,
    format: (value) => (isPlain(value) ? exponent(value, 3) : value) },
  { id: "grad-norm", key: "grad_norm", label: "Gradient norm", field: "gradient norm", wants: '"grad_norm"',
    isSmoothed: true, fromZero: true },
  { id: "tokens-per-second", key: "tokens_per_second", label: "Tokens per second", field: "speed",
    wants: '"tokens" and "seconds"', isSmoothed: true, fromZero: true, format: (value) => count(value) },
];

const curvesOf = (run) => CURVES.map(({ key }) => run[key]).concat([run.memory, run.evals]);

// Where attempts other than the first begin: one from scratch begins at the left end.
function restartsOf(run, range, { tone = "", owner = "" } = {}) {
  const later = run.attempts.filter((_, i) => run.num_attempts > run.attempts.length || i > 0);
  return later.map(({ resumed_step, start_step, is_continuation, world }) => {
    const name = is_continuation ? "continued" : "restart";
    return {
      step: Math.max(resumed_step ?? start_step, range.low), is_continuation, tone,
      label: world ? `${name}, ${plural(world, "rank")}` : name,
      note: `${owner ? `${owner} ` : ""}${is_continuation ? "continued" : "restarted"} from here`,
    };
  });
}

// Null, and a sentence in place of the chart, if no run has the curve.
function curveChart(spec, series, common, cursor) {
  const host = byId(spec.id);
  const log = common.log || "The log has";
  if (!series.some(({ curve, dots }) => curve.steps.length || dots)) {
    host.replaceChildren(missing(`${log} no ${spec.field}: lines of kind "step" have no ${spec.wants}.`));
    return null;
  }
  return cursor.add(new Chart(host, { height: 220, format: number, ticks: tickTexts, ...common, ...spec, series }, cursor));
}

// What the lines, dots and marks mean, apart from the names of runs.
function markKeys(runs, restarts, tone) {
  const keys = [];
  if (runs.some(({ loss }) => loss.old.length)) keys.push(key("line", `${tone} old`, "earlier attempt, run again"));
  const begun = [
    ...(restarts.some(({ is_continuation }) => !is_continuation) ? ["restart"] : []),
    ...(restarts.some(({ is_continuation }) => is_continuation) ? ["continued"] : [])];
  if (begun.length) keys.push(key("restart", "", begun.join(" or ")));
  if (!runs.flatMap(({ loss, evals }) => [...loss.values, ...evals.values]).every(isPlain)) {
    keys.push(key("odd", "", "nan or infinite"));
  }
  return keys;
}
