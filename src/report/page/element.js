"use strict";
// Elements of the page. Texts from a log become text nodes and nothing else: no innerHTML here.
// src/report/page.cpp puts these files into one script, in the order of their names there.

// The JSON that src/report writes: that of one run (page_data.cpp), or of several (comparison_data.cpp).
const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

function fill(node, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat());
  return node;
}

const element = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

const drawn = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const missing = (text) => element("p", { class: "missing" }, text);

// What a legend or a tip has before a name. Tones are classes of page.css.
const swatch = (kind, tone = "") => element("i", { class: `swatch ${kind} ${tone}`.trim(), "aria-hidden": true });

const key = (kind, tone, name) => element("span", {}, swatch(kind, tone), name);

// A line of a legend: the colour and the dashes of a run.
const lineSwatch = (tone) => drawn("svg", { class: `sample-line ${tone}`, width: 24, height: 10, "aria-hidden": true },
  drawn("path", { class: "curve smooth", d: "M1 5H23" }));

// ---- Tables -----------------------------------------------------------------

function bar(share) {
  const inner = element("i");
  inner.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
  return element("span", { class: "bar" }, inner);
}

// A title that begins with "#" is that of a column of numbers. The caption is for those who do not see
// the heading above the table.
function table(caption, titles, rows) {
  const heads = titles.map((title) =>
    element("th", { scope: "col", ...(title.startsWith("#") ? { class: "number" } : {}) }, title.replace("#", "")));
  return element("table", rows.length > 40 ? { class: "long" } : {},
    element("caption", { class: "unseen" }, caption),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

const cell = (text, kind = "") => element("td", kind ? { class: kind } : {}, text);

const rowHead = (text, kind = "") => element("th", { scope: "row", ...(kind ? { class: kind } : {}) }, text);

// Shows `table` in a box that scrolls. The keyboard reaches the box while there is something to scroll.
function showInScroll(box, content, name) {
  box.replaceChildren(content);
  new ResizeObserver(() => {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls) fill(box, { tabindex: 0, role: "region", "aria-label": name });
    else for (const attribute of ["tabindex", "role", "aria-label"]) box.removeAttribute(attribute);
  }).observe(box);
}

// ---- Texts --------------------------------------------------------------------

const sampleFigure = ({ prompt, text }, caption) =>
  element("figure", { class: "sample" }, element("figcaption", {}, caption),
    element("pre", {}, element("span", { class: "prompt" }, prompt), element("span", {}, text)));

function problemsBox({ count: all, lines, first }, of) {
  return [
    element("h2", {}, `${count(all)} of ${plural(lines, "line")} of ${of} could not be read`),
    element("p", { class: "muted" }, "What they say is missing below."),
    element("ul", {}, ...first.map(({ line, what }) => element("li", {}, `line ${line} ${what}`))),
    ...(all > first.length ? [element("p", { class: "muted" }, `and ${count(all - first.length)} more`)] : [])];
}
