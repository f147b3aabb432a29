"use strict";
// Draws the report from the JSON in #data (src/report/page_data.cpp writes it).
// Texts from the log become text nodes and nothing else: no innerHTML here.

const run = JSON.parse(document.getElementById("data").textContent);

// ---- Elements ---------------------------------------------------------------

const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat());
  return node;
}

const element = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

const drawn = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const missing = (text) => element("p", { class: "missing" }, text);

const swatch = (kind, tone) => {
  const node = element("i", { class: `swatch ${kind}` });
  if (tone) node.style.setProperty("--tone", tone);
  return node;
};

// ---- Numbers as people read them --------------------------------------------

// Neither "nan" nor "inf", nor so large that differences overflow.
const isPlain = (value) => typeof value === "number" && Math.abs(value) < 1e300;

const count = (value) => Math.round(value).toLocaleString("en-US");

const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function short(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return trimmed(value / (unit === "k" ? 1e3 : size), 3) + " " + unit;
  }
  return count(value);
}

function trimmed(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") ? String(Number(text)) : text;
}

const exponent = (value, digits) =>
  value.toExponential(digits).replace("e+", "e").replace(/\.?0+e/, "e");

function number(value) {
  if (!isPlain(value)) return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 0.01 && size < 10000 ? value.toFixed(4) : exponent(value, 3);
}

function bytes(value) {
  if (value < 1000) return plural(value, "byte");
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (value /= 1000; value >= 999.95 && unit + 1 < units.length; value /= 1000) ++unit;
  return `${value.toFixed(1)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${count(hours)} h ${two(minutes)} min` : `${minutes} min ${two(whole % 60)} s`;
}

function brief(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(2)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

const moment = (seconds) =>
  seconds === null ? "" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";

// ---- Scales and ticks ---------------------------------------------------------

function linearTicks(low, high, wanted, least = 0) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.7));
  const first = Math.ceil(low / step - 1e-9);
  const ticks = [];
  // Counts steps: if numbers are huge, adding a step may give the same number.
  for (let i = 0; i < 50 && (first + i) * step <= high + step * 1e-9; ++i) ticks.push((first + i) * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / wanted));
  for (const factors of [[1], [1, 3], [1, 2, 5]]) {
    const ticks = [];
    for (let power = first; power <= last; power += factors.length > 1 ? 1 : every) {
      ticks.push(...factors.map((factor) => factor * 10 ** power));
    }
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    if (inside.length >= 3) return inside;
  }
  return linearTicks(low, high, wanted); // less than a decade
}

// The labels of one axis, with the same digits and unit.
function tickTexts(ticks) {
  const top = Math.max(...ticks.map(Math.abs), 0);
  if (top > 0 && top <= 1.0001e-3) return ticks.map((tick) => (tick === 0 ? "0" : exponent(tick, 2)));
  if (top >= 1e5 && ticks.some((tick) => tick !== 0 && Math.abs(tick) < top / 1e5)) {
    return ticks.map((tick) => exponent(tick, 1));
  }
  const [size, unit] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"], [0, ""]].find(([least]) => top >= least);
  const by = unit === "k" ? 1e3 : size || 1;
  const plain = ticks.map((tick) => String(Number((tick / by).toPrecision(6))));
  if (!areEven(ticks)) return plain.map((text) => text + unit);
  const digits = Math.max(0, ...plain.map((text) => (text.split(".")[1] || "").length));
  return plain.map((text) => (text === "0" ? "0" : Number(text).toFixed(digits) + unit));
}

// False on a logarithmic axis.
const areEven = (ticks) => ticks.length < 3 ||
  Math.abs(ticks[1] - ticks[0] - (ticks.at(-1) - ticks.at(-2))) < 1e-6 * Math.abs(ticks.at(-1) - ticks[0]);

function byteTexts(ticks) {
  const top = Math.max(...ticks);
  const [size, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [0, "B"]].find(([least]) => top >= least);
  return ticks.map((tick) => (tick === 0 ? "0" : `${Number((tick / (size || 1)).toPrecision(6))} ${unit}`));
}

// ---- The tip beside the pointer -------------------------------------------------

const tip = byId("tip");

function showTip(title, rows, x, y) {
  tip.replaceChildren(element("b", {}, title), ...rows.map(({ mark, name, value }) =>
    element("div", { class: "row" }, mark || element("i"), element("span", {}, name), element("span", {}, value))));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = x + 14 + width <= room - 6 ? x + 14 : x - 14 - width;
  tip.style.left = `${Math.max(6, Math.min(left, room - width - 6))}px`;
  tip.style.top = `${Math.max(6, Math.min(y - height - 10, innerHeight - height - 6))}px`;
}

const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true, capture: true });

// ---- Curves over the steps ------------------------------------------------------

const restarts = run.attempts.filter((_, i) => run.num_attempts > run.attempts.length || i > 0);
// Where an attempt begins on the axis: an attempt from scratch begins at its left end.
const beginOf = ({ resumed_step, start_step }) => Math.max(resumed_step ?? start_step, steps.low);

const steps = (() => {
  const all = [run.loss, run.lr, run.grad_norm, run.tokens_per_second, run.memory, run.evals]
    .flatMap((curve) => [curve, ...(curve.old || [])])
    .flatMap((curve) => (curve.steps.length ? [curve.steps[0], curve.steps.at(-1)] : []));
  return { low: Math.min(...all), high: Math.max(...all) };
})();

function nearest(places, place) {
  let low = 0;
  let high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < place) low = middle; else high = middle;
  }
  return Math.abs(places[high] - place) < Math.abs(places[low] - place) ? high : low;
}

const exactly = (places, place) => {
  const i = nearest(places, place);
  return places[i] === place ? i : -1;
};

// For each kind, its lower and upper edge when all kinds are stacked.
function stacked(kinds) {
  const floors = kinds[0].values.map(() => 0);
  return kinds.map(({ values }) => values.map((value, i) => [floors[i], (floors[i] += value)]));
}

class Chart {
  // spec: curve or kinds (stacked), dots, name, tone, height, format, ticks, fromZero
  constructor(host, spec) {
    this.host = host;
    this.spec = spec;
    this.isLog = false;
    this.places = spec.places;
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-label", `${spec.label} over the steps; arrow keys read the values`);
    new ResizeObserver(() => this.draw()).observe(host);
    const follow = (event) => {
      const { left } = host.getBoundingClientRect();
      this.pick(nearest(this.places, this.stepAt(event.clientX - left)), event.clientX, event.clientY);
    };
    host.addEventListener("pointermove", follow);
    host.addEventListener("pointerdown", follow);
    for (const name of ["pointerleave", "pointercancel", "blur"]) host.addEventListener(name, () => this.drop());
    host.addEventListener("keydown", (event) => this.walk(event));
    this.draw();
  }

  range() {
    const { spec } = this;
    const values = spec.kinds
      ? stacked(spec.kinds).at(-1).map(([, top]) => top)
      : [spec.curve, spec.dots, ...spec.curve.old, ...(spec.dots ? spec.dots.old : [])]
        .flatMap((curve) => (curve ? curve.values : [])).filter(isPlain);
    const usable = this.isLog ? values.filter((value) => value > 0) : values;
    let low = usable.reduce((a, b) => Math.min(a, b), Infinity);
    let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) {
      const pad = Math.max(10 ** (0.05 * (Math.log10(high) - Math.log10(low))), 1.02);
      return [Math.max(low / pad, 1e-305), Math.min(high * pad, 1e305)];
    }
    if (spec.fromZero && low >= 0) low = 0;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [spec.fromZero && low === 0 ? 0 : low - pad, high + pad];
  }

  place() {
    const { spec } = this;
    const [low, high] = this.range();
    const height = spec.height;
    const top = 10;
    const bottom = height - 26;
    const wanted = Math.max(2, Math.round((bottom - top) / 44));
    const ticks = this.isLog ? logTicks(low, high, wanted) : linearTicks(low, high, wanted);
    const texts = spec.ticks(ticks);
    const left = Math.max(42, 12 + 6.4 * Math.max(...texts.map((text) => text.length)));
    const right = this.host.clientWidth - 10;
    const map = this.isLog ? Math.log : (value) => value;
    const span = Math.max(1, steps.high - steps.low);
    this.x = (step) => left + ((step - steps.low) / span) * (right - left);
    this.stepAt = (x) => steps.low + ((x - left) / (right - left)) * span;
    this.y = (value) => bottom - ((map(value) - map(low)) / (map(high) - map(low))) * (bottom - top);
    this.canPlace = (value) => isPlain(value) && (!this.isLog || value > 0);
    return { left, right, top, bottom, height, ticks, texts };
  }

  draw() {
    const frame = this.place();
    this.frame = frame;
    this.svg = drawn("svg", {
      width: this.host.clientWidth, height: frame.height, role: "img", "aria-label": this.spec.label });
    this.drawAxes(frame);
    if (this.spec.kinds) this.drawStack(); else this.drawCurves(frame);
    this.drawMarks(frame);
    this.cross = drawn("line", { class: "cross none", y1: frame.top, y2: frame.bottom });
    this.focus = drawn("circle", { class: "focus none", r: 4.5 });
    if (this.spec.tone) this.focus.style.setProperty("--tone", this.spec.tone);
    this.svg.append(this.cross, this.focus);
    this.host.replaceChildren(this.svg);
  }

  drawAxes({ left, right, top, bottom, ticks, texts }) {
    ticks.forEach((tick, i) => {
      const y = this.y(tick);
      this.svg.append(
        drawn("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        drawn("text", { x: left - 7, y: y + 3.5, "text-anchor": "end" }, texts[i]));
    });
    this.svg.append(drawn("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    const places = linearTicks(steps.low, steps.high, Math.max(2, (right - left) / 90), 1);
    const names = places.every((place) => place < 1e4) ? places.map(String) : tickTexts(places);
    places.forEach((place, i) => {
      const x = this.x(place);
      const half = 3.2 * names[i].length;
      if (x < left - 1 || x > right + 1) return;
      const anchor = x + half > right + 10 ? "end" : "middle";
      const at = anchor === "end" ? right + 8 : x;
      this.svg.append(drawn("text", { x: at, y: bottom + 19, "text-anchor": anchor }, names[i]));
    });
  }

  path(curve, kind) {
    let isDown = false;
    let text = "";
    curve.values.forEach((value, i) => {
      if (this.canPlace(value)) {
        text += `${isDown ? "L" : "M"}${this.x(curve.steps[i]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      }
      isDown = this.canPlace(value);
    });
    const path = drawn("path", { class: `curve ${kind}`, d: text });
    path.style.setProperty("--tone", this.spec.tone);
    return path;
  }

  points(curve, kind, tone) {
    return curve.values.flatMap((value, i) => {
      if (!this.canPlace(value)) return [];
      const point = drawn("circle", { class: `point ${kind}`, r: 3.75, cx: this.x(curve.steps[i]), cy: this.y(value) });
      point.style.setProperty("--tone", tone);
      return [point];
    });
  }

  drawCurves({ top }) {
    const { curve, dots, tone } = this.spec;
    this.svg.append(
      ...curve.old.map((part) => this.path(part, "old")), this.path(curve, curve.mean ? "main noisy" : "main"),
      ...(curve.mean ? [this.path(curve.mean, "mean")] : []));
    if (curve.values.length === 1) this.svg.append(...this.points(curve, "main", tone));
    if (dots) {
      this.svg.append(
        ...dots.old.flatMap((part) => this.points(part, "old", tone)), ...this.points(dots, "eval", this.spec.dotTone));
    }
    for (const { steps: places, values } of dots ? [curve, dots] : [curve]) {
      values.forEach((value, i) => {
        if (isPlain(value)) return;
        const x = this.x(places[i]);
        this.svg.append(drawn("path", { class: "odd", d: `M${x - 4} ${top}l8 8m0 -8l-8 8` }));
      });
    }
  }

  drawStack() {
    const { kinds, places } = this.spec;
    stacked(kinds).forEach((levels, kind) => {
      const upper = levels.map(([, high], i) => `${this.x(places[i]).toFixed(1)} ${this.y(high).toFixed(1)}`);
      const lower = levels.map(([low], i) => `${this.x(places[i]).toFixed(1)} ${this.y(low).toFixed(1)}`);
      const area = drawn("path", { class: "area", d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` });
      area.style.setProperty("--tone", `var(--kind-${kind})`);
      this.svg.append(area);
    });
  }

  drawMarks({ left, right, top, bottom }) {
    const inside = (step) => step >= steps.low && step <= steps.high;
    const marks = run.checkpoint_marks.filter(inside);
    const shape = marks.length * 9 > right - left ? "l0.4 5h-0.8z" : "l3.5 6h-7z";
    for (const step of marks) {
      this.svg.append(drawn("path", { class: "checkpoint", d: `M${this.x(step)} ${bottom + 1}${shape}` }));
    }
    const taken = []; // where the labels of each line are: [left, right]
    for (const attempt of restarts.filter((one) => beginOf(one) <= steps.high)) {
      const x = this.x(beginOf(attempt));
      this.svg.append(drawn("line", { class: "restart", x1: x, x2: x, y1: top, y2: bottom }));
      if (restarts.length > 3 || !this.spec.namesRestarts) continue;
      const name = attempt.is_continuation ? "continued" : "restart";
      const text = attempt.world ? `${name}, ${plural(attempt.world, "rank")}` : name;
      const width = 6.5 * text.length;
      const fits = x + 6 + width < right;
      const [at, anchor] = fits ? [x + 6, "start"] : [x - 6, "end"];
      const place = fits ? [at, at + width] : [at - width, at];
      let line = taken.findIndex((places) => places.every(([a, b]) => place[1] < a || b < place[0]));
      if (line < 0) line = taken.push([]) - 1;
      taken[line].push(place);
      this.svg.append(drawn("text", { x: at, y: top + 9 + 14 * line, "text-anchor": anchor }, text));
    }
  }

  rows(i, step) {
    const { curve, dots, kinds, format, name, tone } = this.spec;
    const rows = [];
    if (kinds) {
      kinds.forEach((kind, k) => rows.unshift(
        { mark: swatch("", `var(--kind-${k})`), name: kind.name, value: bytes(kind.values[i]) }));
      rows.push({ name: "together", value: bytes(kinds.reduce((sum, kind) => sum + kind.values[i], 0)) });
      return rows;
    }
    rows.push({ mark: swatch("line", tone), name, value: format(curve.values[i]) });
    for (const [part, title, kind] of [
      ...curve.old.map((old) => [old, `${name}, earlier attempt`, "line"]),
      ...(dots ? [[dots, "eval loss", "dot"]] : [])]) {
      const at = part.steps.length ? exactly(part.steps, step) : -1;
      if (at < 0) continue;
      const color = kind === "dot" ? this.spec.dotTone : "var(--old)";
      rows.push({ mark: swatch(kind, color), name: title, value: format(part.values[at]) });
    }
    return rows;
  }

  pick(i, x, y) {
    this.picked = i;
    const step = this.places[i];
    const at = this.x(step);
    this.cross.setAttribute("x1", at);
    this.cross.setAttribute("x2", at);
    this.cross.classList.remove("none");
    const value = this.spec.curve && this.spec.curve.values[i];
    this.focus.classList.toggle("none", !this.canPlace(value));
    if (this.canPlace(value)) fill(this.focus, { cx: at, cy: this.y(value) }, []);
    const notes = [];
    if (run.checkpoint_marks.includes(step)) notes.push("checkpoint");
    const begun = restarts.find((attempt) => beginOf(attempt) === step);
    if (begun) notes.push(begun.is_continuation ? "continued from here" : "restarted from here");
    showTip([`step ${count(step)}`, ...notes].join(", "), this.rows(i, step), x, y);
  }

  drop() {
    hideTip();
    this.cross.classList.add("none");
    this.focus.classList.add("none");
  }

  walk(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const i = Math.max(0, Math.min(this.places.length - 1, (this.picked ?? this.places.length) + way));
    const { left, top } = this.host.getBoundingClientRect();
    this.pick(i, left + this.x(this.places[i]), top + 40);
  }
}

function curveChart(id, curve, spec) {
  const host = byId(id);
  if (!curve.steps.length) {
    host.replaceChildren(missing(`The log has no ${spec.field}: its lines of kind "step" have no "${spec.key}".`));
    return null;
  }
  return new Chart(host, {
    curve, places: curve.steps, height: 190, format: number, ticks: tickTexts, tone: "var(--accent)", ...spec });
}

function drawCharts() {
  const hasCurve = run.loss.steps.length > 0;
  const hasDots = run.evals.steps.length > 0;
  const ofLoss = { label: "Loss", field: "loss", key: "loss", height: 300, namesRestarts: true };
  const loss = hasCurve || !hasDots
    ? curveChart("loss", run.loss, { ...ofLoss, name: "loss", dots: hasDots ? run.evals : null, dotTone: "var(--eval)" })
    : curveChart("loss", run.evals, { ...ofLoss, name: "eval loss", tone: "var(--eval)" });
  curveChart("lr", run.lr, {
    label: "Learning rate", name: "learning rate", field: "learning rate", key: "lr", height: 130, fromZero: true,
    format: (value) => (isPlain(value) ? exponent(value, 3) : value) });
  curveChart("grad-norm", run.grad_norm, {
    label: "Gradient norm", name: "gradient norm", field: "gradient norm", key: "grad_norm", fromZero: true });
  curveChart("tokens-per-second", run.tokens_per_second, {
    label: "Tokens per second", name: "tokens per second", field: "speed", key: "tokens\" and \"seconds",
    fromZero: true, format: (value) => count(value) });

  const button = byId("log-scale");
  button.disabled = !loss;
  button.addEventListener("click", () => {
    loss.isLog = !loss.isLog;
    button.setAttribute("aria-pressed", loss.isLog);
    loss.draw();
  });
  if (!loss) return;
  const key = (kind, tone, name) => element("span", {}, swatch(kind, tone), name);
  const legend = hasCurve
    ? [key("line", "var(--accent)", run.loss.mean ? "training, mean over its extremes" : "training")] : [];
  if (hasDots) legend.push(key("dot", "var(--eval)", "evaluation"));
  if (run.loss.old.length) legend.push(key("line", "var(--old)", "earlier attempt, run again"));
  const begun = [
    ...(restarts.some(({ is_continuation }) => !is_continuation) ? ["restart"] : []),
    ...(restarts.some(({ is_continuation }) => is_continuation) ? ["continued"] : [])];
  if (begun.length) legend.push(key("restart", "", begun.join(" or ")));
  if (![...run.loss.values, ...run.evals.values].every(isPlain)) legend.push(key("odd", "", "nan or infinite"));
  if (run.checkpoint_marks.length) legend.push(key("checkpoint", "", "checkpoint"));
  byId("loss-legend").append(...legend);
}

function drawMemory() {
  const { steps: places, kinds } = run.memory;
  if (!places.length) {
    byId("memory").replaceChildren(missing('The log has no memory: its lines of kind "step" have no "memory".'));
    return;
  }
  byId("memory-legend").append(...kinds.map((kind, i) => {
    const most = kind.values.reduce((a, b) => Math.max(a, b), 0);
    return element("span", {}, swatch("", `var(--kind-${i})`), `${kind.name} ${bytes(most)}`);
  }));
  new Chart(byId("memory"), {
    label: "Memory", kinds, places, height: 260, ticks: byteTexts, fromZero: true });
}

// ---- The timeline of a step -------------------------------------------------------

const LANE = 17;
const LANE_GAP = 3;
const RANK_HEAD = 22;
const RANK_GAP = 10;
const AXIS = 24;
const GUTTER = 66;

const laneTitle = (lane) => (lane === "wait" ? "exposed waiting" : lane);

class Lanes {
  constructor(host, timeline) {
    this.host = host;
    this.timeline = timeline;
    this.zoom = 1;
    const rank = RANK_HEAD + run.lanes.length * (LANE + LANE_GAP) + RANK_GAP;
    this.tops = timeline.ranks.map((_, i) => i * rank);
    this.height = timeline.ranks.length * rank + AXIS;
    this.scroll = element("div", { class: "scroll" });
    host.replaceChildren(element("div", { class: "lanes" }, this.gutter(), this.scroll));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(host);
    this.scroll.addEventListener("pointermove", (event) => this.follow(event));
    this.scroll.addEventListener("pointerdown", (event) => this.follow(event));
    this.scroll.addEventListener("pointerleave", () => this.light(null));
    this.draw();
  }

  laneTop(rank, lane) {
    return this.tops[rank] + RANK_HEAD + lane * (LANE + LANE_GAP);
  }

  gutter() {
    const svg = drawn("svg", { class: "gutter", width: GUTTER, height: this.height, "aria-hidden": true });
    this.timeline.ranks.forEach(({ rank }, i) => {
      svg.append(drawn("text", { class: "rank", x: 0, y: this.tops[i] + 15 }, `rank ${rank}`));
      run.lanes.forEach((lane, k) =>
        svg.append(drawn("text", { x: 0, y: this.laneTop(i, k) + 12 }, lane)));
    });
    return svg;
  }

  draw() {
    const width = Math.max(80, this.host.clientWidth - GUTTER - 2) * this.zoom;
    const scale = (width - 12) / Math.max(this.timeline.seconds, 1e-9);
    const svg = drawn("svg", {
      width, height: this.height, role: "img", "aria-label": `Timeline of step ${this.timeline.step}` });
    this.drawAxis(svg, scale, width);
    this.timeline.ranks.forEach((rank, i) => {
      run.lanes.forEach((_, k) => svg.append(
        drawn("rect", { class: "lane", x: 0, y: this.laneTop(i, k), width: width - 12, height: LANE, rx: 3 })));
      rank.spans.forEach((span, s) => this.drawSpan(svg, scale, i, s, span));
    });
    this.scroll.replaceChildren(svg);
    this.lit = null;
  }

  drawAxis(svg, scale, width) {
    const ticks = linearTicks(0, this.timeline.seconds, Math.max(2, width / 110));
    const top = this.timeline.seconds;
    const [by, unit] = top >= 2 ? [1, "s"] : top >= 2e-3 ? [1e3, "ms"] : [1e6, "µs"];
    for (const tick of ticks) {
      const x = tick * scale;
      svg.append(
        drawn("line", { class: "grid", x1: x, x2: x, y1: RANK_HEAD - 4, y2: this.height - AXIS }),
        drawn("text", { x, y: this.height - 6, "text-anchor": tick === 0 ? "start" : x > width - 34 ? "end" : "middle" },
          tick === 0 ? "0" : `${Number((tick * by).toPrecision(4))} ${unit}`));
    }
  }

  drawSpan(svg, scale, rank, index, [lane, name, start, end]) {
    const x = start * scale;
    const width = Math.max(1, (end - start) * scale - 0.75);
    const y = this.laneTop(rank, lane);
    svg.append(drawn("rect", {
      class: `span ${run.lanes[lane]}`, x, y, width, height: LANE, rx: Math.min(2.5, width / 3),
      "data-rank": rank, "data-span": index }));
    const text = this.timeline.names[name];
    const room = Math.floor((width - 8) / 5.9);
    const label = text.length <= room ? text : text.split(" ")[0];
    if (label && label.length <= room) svg.append(drawn("text", { class: "name", x: x + 4, y: y + 12 }, label));
  }

  light(node) {
    if (this.lit) this.lit.classList.remove("lit");
    this.lit = node;
    if (node) node.classList.add("lit"); else hideTip();
  }

  follow(event) {
    const node = event.target.closest("[data-span]");
    this.light(node);
    if (!node) return;
    const [lane, name, start, end] = this.timeline.ranks[node.dataset.rank].spans[node.dataset.span];
    const kind = run.lanes[lane];
    showTip(this.timeline.names[name] || kind, [
      { mark: swatch(kind), name: laneTitle(kind), value: `rank ${this.timeline.ranks[node.dataset.rank].rank}` },
      { name: "from", value: brief(start) },
      { name: "to", value: brief(end) },
      { name: "took", value: `${brief(end - start)}, ${percent((end - start) / this.timeline.seconds)}` },
    ], event.clientX, event.clientY);
  }
}

function drawShares({ ranks, seconds }) {
  const titles = run.lanes.map(laneTitle);
  const rows = ranks.map(({ rank, busy }) => element("tr", {}, element("td", {}, String(rank)),
    ...busy.map((time, lane) => element("td", { class: run.lanes[lane] },
      percent(time / seconds), bar(time / seconds)))));
  byId("shares").replaceChildren(table(["rank", ...titles], rows));
}

function drawTimelines() {
  const timelines = run.timelines.filter(({ ranks, seconds }) => ranks.length && seconds > 0);
  if (!timelines.length) {
    byId("timeline").replaceChildren(missing('The log has no timeline: it has no line of kind "timeline" with spans.'));
    return;
  }
  const note = byId("timeline-note");
  const zoomOut = element("button", { type: "button", "aria-label": "zoom out" }, "−");
  const zoomIn = element("button", { type: "button", "aria-label": "zoom in" }, "+");
  let lanes = null;

  const zoomTo = (zoom) => {
    lanes.zoom = zoom;
    lanes.draw();
    zoomOut.disabled = zoom <= 1;
    zoomIn.disabled = zoom >= 16;
  };
  const show = (timeline) => {
    if (lanes) lanes.observer.disconnect();
    lanes = new Lanes(byId("timeline"), timeline);
    zoomTo(1);
    drawShares(timeline);
    const leftOut = timeline.ranks.reduce((sum, rank) => sum + rank.left_out, 0);
    const parts = [`step ${count(timeline.step)}, ${brief(timeline.seconds)}`];
    if (timeline.num_ranks > timeline.ranks.length) {
      parts.push(`${timeline.ranks.length} of ${plural(timeline.num_ranks, "rank")}`);
    }
    if (run.num_timelines > run.timelines.length) {
      parts.push(`the newest ${run.timelines.length} of ${plural(run.num_timelines, "timeline")} can be chosen`);
    }
    if (leftOut) parts.push(`the shortest ${plural(leftOut, "span")} not drawn`);
    note.textContent = parts.join("; ");
  };
  zoomOut.addEventListener("click", () => zoomTo(lanes.zoom / 2));
  zoomIn.addEventListener("click", () => zoomTo(lanes.zoom * 2));
  byId("timeline-controls").append(zoomOut, zoomIn);

  if (timelines.length > 1) {
    const choice = element("select", { "aria-label": "step" }, ...timelines.map((timeline, i) =>
      element("option", { value: i }, `step ${count(timeline.step)}, ${plural(timeline.num_ranks, "rank")}`)));
    choice.value = timelines.length - 1;
    choice.addEventListener("change", () => show(timelines[choice.value]));
    byId("timeline-controls").prepend(choice);
  }
  byId("timeline-legend").append(
    ...run.lanes.map((lane) => element("span", {}, swatch(lane), laneTitle(lane))));
  show(timelines.at(-1));
}

// ---- Tables and lists ---------------------------------------------------------------

function bar(share) {
  const inner = element("i");
  inner.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
  return element("span", { class: "bar" }, inner);
}

function table(titles, rows) {
  const heads = titles.map((title) =>
    element("th", title.startsWith("#") ? { class: "number" } : {}, title.replace("#", "")));
  return element("table", rows.length > 40 ? { class: "long" } : {},
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

const cell = (text, kind = "") => element("td", kind ? { class: kind } : {}, text);

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
  byId("units").replaceChildren(table(["unit", "#parameters", "#full", "#shard"], [
    ...rows.map(([name, ...values]) => element("tr", { class: "unit" },
      element("td", { class: "mono" }, name || "(root)", bar(values[0] / most)), ...sizes(values))),
    element("tr", { class: "total" }, cell("all"), ...sizes(total))]));
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
  byId("checkpoints").replaceChildren(table(["#step", "#blocked", "path", "attempt"], run.checkpoints.map((checkpoint) =>
    element("tr", { class: "saved" }, cell(count(checkpoint.step), "number"),
      cell(checkpoint.blocked_seconds === null ? "" : brief(checkpoint.blocked_seconds), "number"),
      cell(checkpoint.path, "mono"), cell(attemptNumber(checkpoint.attempt))))));
}

function drawSamples() {
  if (!run.samples.length) {
    byId("samples").replaceChildren(missing('The log has no sample: no line of kind "sample".'));
    return;
  }
  byId("samples-note").textContent = newestOf(run.samples.length, run.num_samples, "sample");
  const figures = [...run.samples].reverse().map(({ step, prompt, text }) =>
    element("figure", { class: "sample" }, element("figcaption", {}, `after step ${count(step)}`),
      element("pre", {}, element("span", { class: "prompt" }, prompt), element("span", {}, text))));
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
  byId("config").replaceChildren(table(["name", "value"], run.config.map(([name, value, was]) =>
    element("tr", {}, cell(name, "mono"), element("td", { class: "mono" }, value,
      ...(was === null ? [] : [element("span", { class: "was" }, `  (before: ${was})`)]))))));
}

// ---- Summary --------------------------------------------------------------------------

function drawProblems() {
  const { count: all, lines, first, torn } = run.problems;
  const cut = torn ? ` ${plural(torn, "line")} cut off by a kill.` : "";
  byId("footer").textContent = `Made from ${plural(lines, "line")} of log.jsonl.${cut}`;
  if (!all) return;
  const box = byId("problems");
  box.hidden = false;
  box.append(
    element("h2", {}, `${count(all)} of ${plural(lines, "line")} of the log could not be read`),
    element("p", { class: "muted" }, "What they say is missing below."),
    element("ul", {}, ...first.map(({ line, what }) => element("li", {}, `line ${line} ${what}`))),
    ...(all > first.length ? [element("p", { class: "muted" }, `and ${count(all - first.length)} more`)] : []));
}

function drawTiles() {
  const { summary } = run;
  const tiles = [
    ["final_loss", "Final loss", summary.final_loss === null ? "none" : number(summary.final_loss),
      summary.final_loss === null ? "" : `at step ${count(summary.final_loss_step)}, from ${number(summary.first_loss)}`],
    ["best_eval", "Best eval loss", summary.best_eval ? number(summary.best_eval.loss) : "none",
      summary.best_eval ? `at step ${count(summary.best_eval.step)}` : "no evaluation in the log"],
    ["steps", "Steps", count(summary.last_step),
      summary.num_repeated ? `${count(summary.num_repeated)} of them run again` : `${count(summary.num_steps)} in the log`],
    ["tokens", "Tokens", summary.tokens ? short(summary.tokens) : "?",
      summary.tokens ? `${count(summary.tokens)} in all` : "none in the log"],
    ["time", "Time", duration(summary.seconds),
      run.num_attempts > 1 ? `in ${plural(run.num_attempts, "attempt")}` : "in one attempt"],
    ["tokens_per_second", "Tokens per second", summary.tokens_per_second === null ? "?" : short(summary.tokens_per_second),
      summary.tokens_per_second === null ? "none in the log" : "median of the steps"],
    ["world", "Ranks", (summary.num_worlds > 4 ? "… → " : "") + summary.worlds.slice(-4).join(" → ") || "?",
      summary.num_worlds > 1 ? "as it was resumed" : "world size"],
    ["peak_memory", "Peak memory", summary.peak_memory_bytes === null ? "?" : bytes(summary.peak_memory_bytes),
      summary.peak_memory_bytes === null ? "none in the log" : `per rank, at step ${count(summary.peak_memory_step)}`],
  ];
  byId("tiles").append(...tiles.map(([key, title, value, more]) => element("div", { class: "tile", "data-key": key },
    element("div", { class: "title" }, title), element("div", { class: "value" }, value),
    element("div", { class: "more" }, more))));
}

function drawHead() {
  const { facts } = run;
  const { state } = run.summary;
  const name = facts.name || "Training run";
  document.title = `${name}: training report`;
  byId("name").textContent = name;
  byId("state").textContent = state;
  byId("state").classList.toggle("finished", state === "finished");
  byId("subtitle").textContent = run.attempts.at(-1).end_reason === null
    ? "Training report. The log has no end: the run was killed, or is still going on." : "Training report";
  const rows = [
    ["device", facts.device], ["host", facts.host], ...facts.versions,
    ["began", moment(facts.began)], ["last line", moment(facts.last_seen)]];
  byId("facts").append(...rows.filter(([, value]) => value).map(([key, value]) =>
    element("div", {}, element("dt", {}, key), element("dd", {}, value))));
}

drawHead();
drawProblems();
drawTiles();
drawCharts();
drawMemory();
drawTimelines();
drawUnits();
drawAttempts();
drawCheckpoints();
drawSamples();
drawConfig();
