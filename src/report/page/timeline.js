// What each rank did in one step, by lane.

const LANE = 17;
const LANE_GAP = 3;
const RANK_HEAD = 22;
const RANK_GAP = 10;
const AXIS = 40;
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
    this.chosen = null; // what the keyboard is at: [rank, span]
    this.scroll = element("div", {
      class: "scroll", tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": `Timeline of step ${timeline.step}. Left and right arrow go along a lane, up and down to other lanes` });
    host.replaceChildren(element("div", { class: "lanes" }, this.gutter(), this.scroll));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(host);
    this.scroll.addEventListener("pointermove", (event) => this.follow(event));
    this.scroll.addEventListener("pointerdown", (event) => this.follow(event));
    for (const name of ["pointerleave", "blur"]) this.scroll.addEventListener(name, () => this.light(null));
    this.scroll.addEventListener("keydown", (event) => this.walk(event));
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
      width, height: this.height, "aria-hidden": true, "data-label": `Timeline of step ${this.timeline.step}` });
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
        drawn("text", { x, y: this.height - 22, "text-anchor": tick === 0 ? "start" : x > width - 34 ? "end" : "middle" },
          tick === 0 ? "0" : `${Number((tick * by).toPrecision(4))} ${unit}`));
    }
    svg.append(drawn("text", { class: "title", x: Math.min(width, this.host.clientWidth - GUTTER) / 2, y: this.height - 4,
      "text-anchor": "middle" }, "time since the step began"));
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
    if (node) node.classList.add("lit"); else Tip.hide();
  }

  follow(event) {
    const node = event.target.closest("[data-span]");
    this.light(node);
    if (node) this.tell(node, () => [event.clientX, event.clientY], false);
  }

  tell(node, place, isOfKeyboard) {
    const { rank, spans } = this.timeline.ranks[node.dataset.rank];
    const [lane, name, start, end] = spans[node.dataset.span];
    const kind = run.lanes[lane];
    const title = this.timeline.names[name] || kind;
    const rows = [
      { mark: swatch("", kind), name: laneTitle(kind), value: `rank ${rank}` },
      { name: "from", value: brief(start) },
      { name: "to", value: brief(end) },
      { name: "took", value: `${brief(end - start)}, ${percent((end - start) / this.timeline.seconds)}` },
    ];
    Tip.show(title, rows, place, isOfKeyboard);
    if (isOfKeyboard) byId("said").textContent = spoken(title, rows);
  }

  // The keyboard goes along a lane, or to the span of another lane or rank that is nearest in time.
  walk(event) {
    if (event.key === "Escape") this.light(null);
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const lanes = this.lanesWithSpans();
    const at = lanes.findIndex((lane) => lane.some((place) => place.join() === (this.chosen || []).join()));
    if (at < 0) {
      this.choose(lanes[0][0]);
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const lane = lanes[Math.max(0, Math.min(lanes.length - 1, at + (event.key === "ArrowUp" ? -1 : 1)))];
      const startOf = ([rank, span]) => this.timeline.ranks[rank].spans[span][2];
      this.choose(lane[nearest(lane.map(startOf), startOf(this.chosen))]);
    } else {
      const lane = lanes[at];
      const i = lane.findIndex((place) => place.join() === this.chosen.join());
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: lane.length - 1 }[event.key];
      this.choose(lane[Math.max(0, Math.min(lane.length - 1, to))]);
    }
  }

  // From top to bottom; each has the places [rank, span] of its spans.
  lanesWithSpans() {
    return this.timeline.ranks.flatMap(({ spans }, rank) => run.lanes.map((_, lane) =>
      spans.flatMap((span, i) => (span[0] === lane ? [[rank, i]] : [])))).filter((places) => places.length);
  }

  choose([rank, span]) {
    this.chosen = [rank, span];
    const node = this.scroll.querySelector(`[data-rank="${rank}"][data-span="${span}"]`);
    node.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.light(node);
    this.tell(node, () => {
      const { left, top } = node.getBoundingClientRect();
      return [left, top];
    }, true);
  }
}

function drawShares({ ranks, seconds }) {
  const titles = run.lanes.map(laneTitle);
  const rows = ranks.map(({ rank, busy }) => element("tr", {}, rowHead(String(rank)),
    ...busy.map((time, lane) => element("td", { class: run.lanes[lane] },
      percent(time / seconds), bar(time / seconds)))));
  showInScroll(byId("shares"), table("Share of the step that each lane was busy", ["rank", ...titles], rows), "Shares of the step");
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
    ...run.lanes.map((lane) => key("", lane, laneTitle(lane))));
  show(timelines.at(-1));
}
