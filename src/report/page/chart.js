// A chart over the steps: curves of one or more runs, or kinds that are stacked.

const MARGIN = { top: 26, right: 10, bottom: 42 };

// For each kind, its lower and upper edge when all kinds are stacked.
function stacked(kinds) {
  const floors = kinds[0].values.map(() => 0);
  return kinds.map(({ values }) => values.map((value, i) => [floors[i], (floors[i] += value)]));
}

// From the first to the last step of all curves.
function stepRange(curves) {
  const ends = curves.flatMap((curve) => [curve, ...(curve.old || [])])
    .flatMap(({ steps }) => (steps.length ? [steps[0], steps.at(-1)] : []));
  return { low: Math.min(...ends), high: Math.max(...ends) };
}

const ascending = (places) => [...new Set(places)].sort((a, b) => a - b);

// The point of a curve at a step, or so near that it cannot be told apart; -1 if there is none.
function pointAt(places, step, range) {
  if (!places.length) return -1;
  const i = nearest(places, step);
  return Math.abs(places[i] - step) <= (range.high - range.low) / 300 ? i : -1;
}

class Chart {
  // spec: label, range (of steps), height, format, ticks, fromZero, namesRestarts, checkpoints (steps),
  //   restarts ({ step, label, note, tone }), and either
  //   series: [{ name, tone, curve, dots, dotName, dotTone, isHidden }], where curve is { steps, values, old, mean }
  //   or kinds: [{ name, values }] and places (their steps).
  constructor(host, spec, cursor) {
    Object.assign(this, { host, spec, cursor, isLog: false, amount: 0 });
    this.places = spec.places || ascending(
      spec.series.flatMap(({ curve, dots }) => [...curve.steps, ...(dots ? dots.steps : [])]));
    fill(host, {
      tabindex: 0, role: "slider", "aria-label": `${spec.label} by step`, "aria-orientation": "horizontal",
      "aria-valuemin": this.places[0], "aria-valuemax": this.places.at(-1), "aria-valuenow": this.places.at(-1) });
    new ResizeObserver(() => this.draw()).observe(host);
    this.listen();
    this.draw();
    host.setAttribute("aria-valuetext", spoken(this.title(this.places.at(-1)), this.rows(this.places.at(-1))));
  }

  listen() {
    const { host } = this;
    const follow = (event) => {
      const { left } = host.getBoundingClientRect();
      const step = this.places[nearest(this.places, this.stepAt(event.clientX - left))];
      this.cursor.show(this, step, () => [event.clientX, event.clientY], false);
    };
    host.addEventListener("pointermove", follow);
    host.addEventListener("pointerdown", follow);
    for (const name of ["pointerleave", "pointercancel", "blur"]) host.addEventListener(name, () => this.cursor.hide());
    host.addEventListener("focus", () => { if (host.matches(":focus-visible")) this.go(0); });
    host.addEventListener("keydown", (event) => this.walk(event));
  }

  // ---- The keyboard ----

  walk(event) {
    const far = Math.max(1, Math.round(this.places.length / 10));
    const way = {
      ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -Infinity, End: Infinity,
    }[event.key];
    if (event.key === "Escape") this.cursor.hide();
    if (!way) return;
    event.preventDefault();
    this.go(way);
  }

  // So many points to the right of where the cursor was last; it begins at the last point.
  go(way) {
    const last = this.places.length - 1;
    const from = this.cursor.lastStep === null ? last : nearest(this.places, this.cursor.lastStep);
    const step = this.places[Math.max(0, Math.min(last, from + way))];
    this.cursor.show(this, step, () => {
      const { left, top } = this.host.getBoundingClientRect();
      return [left + this.x(step), top + 60];
    }, true);
  }

  // ---- Where things are ----

  shown() {
    return this.spec.series.filter(({ isHidden }) => !isHidden);
  }

  numbers() {
    const { kinds } = this.spec;
    if (kinds) return stacked(kinds).at(-1).map(([, top]) => top);
    return this.shown().flatMap(({ curve, dots }) => [curve, dots, ...curve.old, ...(dots ? dots.old : [])])
      .flatMap((curve) => (curve ? curve.values : [])).filter(isPlain);
  }

  extent() {
    const values = this.isLog ? this.numbers().filter((value) => value > 0) : this.numbers();
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) {
      const pad = Math.max(10 ** (0.05 * (Math.log10(high) - Math.log10(low))), 1.02);
      return [Math.max(low / pad, 1e-305), Math.min(high * pad, 1e305)];
    }
    const isFromZero = this.spec.fromZero && low >= 0;
    if (isFromZero) low = 0;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [isFromZero ? 0 : low - pad, high + pad];
  }

  place() {
    const { spec } = this;
    const [low, high] = this.extent();
    const { top } = MARGIN;
    const bottom = spec.height - MARGIN.bottom;
    const wanted = Math.max(2, Math.round((bottom - top) / 44));
    const ticks = this.isLog ? logTicks(low, high, wanted) : linearTicks(low, high, wanted);
    const texts = spec.ticks(ticks);
    const left = Math.max(50, 12 + 6.4 * Math.max(...texts.map((text) => text.length)));
    const right = this.host.clientWidth - MARGIN.right;
    const map = this.isLog ? Math.log : (value) => value;
    const span = Math.max(1, spec.range.high - spec.range.low);
    this.x = (step) => left + ((step - spec.range.low) / span) * (right - left);
    this.stepAt = (x) => spec.range.low + ((x - left) / (right - left)) * span;
    this.y = (value) => bottom - ((map(value) - map(low)) / (map(high) - map(low))) * (bottom - top);
    this.canPlace = (value) => isPlain(value) && (!this.isLog || value > 0);
    return { left, right, top, bottom, ticks, texts };
  }

  // ---- Drawing ----

  draw() {
    const frame = this.place();
    this.svg = drawn("svg", {
      width: this.host.clientWidth, height: this.spec.height, "aria-hidden": true, "data-label": this.spec.label });
    this.drawAxes(frame);
    if (this.spec.kinds) this.drawStack(); else this.drawSeries(frame);
    this.drawMarks(frame);
    this.cross = drawn("line", { class: "cross none", y1: frame.top, y2: frame.bottom });
    this.dots = (this.spec.series || []).map(({ tone }) => drawn("circle", { class: `focus none ${tone}`, r: 4.5 }));
    this.svg.append(this.cross, ...this.dots);
    this.host.replaceChildren(this.svg);
    if (this.cursor.step !== null) this.mark(this.cursor.step);
  }

  drawAxes({ left, right, top, bottom, ticks, texts }) {
    const { label, range } = this.spec;
    ticks.forEach((tick, i) => {
      const y = this.y(tick);
      this.svg.append(
        drawn("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        drawn("text", { x: left - 7, y: y + 3.5, "text-anchor": "end" }, texts[i]));
    });
    this.svg.append(
      drawn("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      drawn("text", { class: "title", x: 0, y: top - 15 }, label.toLowerCase()),
      drawn("text", { class: "title", x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, "step"));
    const places = linearTicks(range.low, range.high, Math.max(2, (right - left) / 90), 1);
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

  path({ steps, values }, kind) {
    let isDown = false;
    let text = "";
    values.forEach((value, i) => {
      if (this.canPlace(value)) {
        text += `${isDown ? "L" : "M"}${this.x(steps[i]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      }
      isDown = this.canPlace(value);
    });
    return drawn("path", { class: `curve ${kind}`, d: text });
  }

  points({ steps, values }, kind) {
    const r = this.spec.series.length > 1 ? 3 : 3.75;
    return values.flatMap((value, i) => (this.canPlace(value)
      ? [drawn("circle", { class: `point ${kind}`, r, cx: this.x(steps[i]), cy: this.y(value) })] : []));
  }

  crosses({ steps, values }, top) {
    return values.flatMap((value, i) => (isPlain(value)
      ? [] : [drawn("path", { class: "odd", d: `M${this.x(steps[i]) - 4} ${top}l8 8m0 -8l-8 8` })]));
  }

  // What is raw lies behind what is smoothed, of all runs.
  drawSeries({ top }) {
    const behind = [];
    const before = [];
    for (const { curve, dots, tone, dotTone, isSmoothed } of this.shown()) {
      const smooth = isSmoothed ? smoothed(curve, this.amount) : curve.mean || null;
      behind.push(...curve.old.map((part) => this.path(part, `old ${tone}`)));
      (smooth ? behind : before).push(this.path(curve, `main ${smooth ? "noisy" : "smooth"} ${tone}`));
      if (smooth) before.push(this.path(smooth, `smooth ${tone}`));
      if (curve.values.length === 1) before.push(...this.points(curve, `main ${tone}`));
      if (dots) {
        behind.push(...dots.old.flatMap((part) => this.points(part, `old ${tone}`)));
        before.push(...this.points(dots, `eval ${dotTone}`));
      }
      for (const part of dots ? [curve, dots] : [curve]) before.push(...this.crosses(part, top));
    }
    this.svg.append(...behind, ...before);
  }

  drawStack() {
    const { kinds, places } = this.spec;
    stacked(kinds).forEach((levels, kind) => {
      const upper = levels.map(([, high], i) => `${this.x(places[i]).toFixed(1)} ${this.y(high).toFixed(1)}`);
      const lower = levels.map(([low], i) => `${this.x(places[i]).toFixed(1)} ${this.y(low).toFixed(1)}`);
      this.svg.append(
        drawn("path", { class: `area kind-${kind}`, d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` }));
    });
  }

  drawMarks({ left, right, top, bottom }) {
    const { range, checkpoints, restarts, namesRestarts } = this.spec;
    const marks = checkpoints.filter((step) => step >= range.low && step <= range.high);
    const shape = marks.length * 9 > right - left ? "l0.4 5h-0.8z" : "l3.5 6h-7z";
    for (const step of marks) {
      this.svg.append(drawn("path", { class: "checkpoint", d: `M${this.x(step)} ${bottom + 1}${shape}` }));
    }
    const taken = []; // where the labels of each line are: [left, right]
    for (const { step, label, tone } of restarts.filter((one) => one.step <= range.high)) {
      const x = this.x(step);
      this.svg.append(drawn("line", { class: `restart ${tone}`, x1: x, x2: x, y1: top, y2: bottom }));
      if (restarts.length > 3 || !namesRestarts) continue;
      const width = 6.5 * label.length;
      const fits = x + 6 + width < right;
      const [at, anchor] = fits ? [x + 6, "start"] : [x - 6, "end"];
      const place = fits ? [at, at + width] : [at - width, at];
      let line = taken.findIndex((places) => places.every(([a, b]) => place[1] < a || b < place[0]));
      if (line < 0) line = taken.push([]) - 1;
      taken[line].push(place);
      this.svg.append(drawn("text", { x: at, y: top + 9 + 14 * line, "text-anchor": anchor }, label));
    }
  }

  // ---- The cursor ----

  mark(step) {
    fill(this.cross, { x1: this.x(step), x2: this.x(step) });
    this.cross.classList.remove("none");
    (this.spec.series || []).forEach(({ curve, isHidden }, k) => {
      const i = pointAt(curve.steps, step, this.spec.range);
      const isThere = !isHidden && i >= 0 && this.canPlace(curve.values[i]);
      this.dots[k].classList.toggle("none", !isThere);
      if (isThere) fill(this.dots[k], { cx: this.x(curve.steps[i]), cy: this.y(curve.values[i]) });
    });
  }

  unmark() {
    for (const node of [this.cross, ...this.dots]) node.classList.add("none");
  }

  title(step) {
    const { checkpoints, restarts } = this.spec;
    const notes = checkpoints.includes(step) ? ["checkpoint"] : [];
    notes.push(...restarts.filter((one) => one.step === step).map(({ note }) => note));
    return [`step ${count(step)}`, ...notes].join(", ");
  }

  // One value of a curve; a point beside the step says where it is.
  row(mark, name, { steps, values }, step) {
    const i = pointAt(steps, step, this.spec.range);
    if (i < 0) return { mark, name, value: "none" };
    const value = values[i] === null ? "none" : this.spec.format(values[i]);
    return { mark, name: steps[i] === step ? name : `${name} (step ${count(steps[i])})`, value };
  }

  rowsOf({ curve, dots, name, tone, dotName, dotTone, isSmoothed }, step) {
    const isAt = ({ steps }) => steps.length && steps[nearest(steps, step)] === step;
    const rows = [this.row(lineSwatch(tone), name, curve, step)];
    const smooth = isSmoothed && this.amount ? smoothed(curve, this.amount) : null;
    if (smooth && rows[0].value !== "none") {
      const average = this.row(null, `${name}, smoothed`, smooth, step);
      // Where there are several runs, rows are dear.
      if (this.spec.series.length > 1) rows[0].value += `, smoothed ${average.value}`; else rows.push(average);
    }
    for (const old of curve.old.filter(isAt)) {
      rows.push(this.row(swatch("line", `${tone} old`), `${name}, earlier attempt`, old, step));
    }
    if (dots && isAt(dots)) rows.push(this.row(swatch("dot", dotTone), dotName, dots, step));
    return rows;
  }

  rows(step) {
    const { kinds, places } = this.spec;
    if (!kinds) return this.shown().flatMap((series) => this.rowsOf(series, step));
    const i = nearest(places, step);
    return [
      ...kinds.map((kind, k) => ({ mark: swatch("", `kind-${k}`), name: kind.name, value: bytes(kind.values[i]) })).reverse(),
      ...this.briefRows(step)];
  }

  // What other charts say of this one.
  briefRows(step) {
    const { kinds, places } = this.spec;
    if (!kinds) return this.shown().map(({ name, tone, curve }) => this.row(lineSwatch(tone), name, curve, step));
    const i = pointAt(places, step, this.spec.range);
    const value = i < 0 ? "none" : bytes(kinds.reduce((sum, kind) => sum + kind.values[i], 0));
    return [{ name: "memory, together", value }];
  }
}
