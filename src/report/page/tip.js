// The tip beside the pointer, or beside what the keyboard has chosen. What it shows is also said in the
// text of the chart (aria-valuetext) or in #said, so the tip itself is hidden from screen readers.

const tip = byId("tip");

const Tip = {
  place: null, // where the tip belongs, while the keyboard has it

  // place() returns the point that the tip stands beside. A tip of the keyboard follows that point when
  // the page scrolls; that of the pointer goes away.
  show(title, rows, place, isOfKeyboard) {
    tip.replaceChildren(element("b", {}, title), ...rows.map(({ mark, name, value }) =>
      element("div", { class: "row" }, mark || element("i"), element("span", {}, name), element("span", {}, value))));
    tip.hidden = false;
    this.place = isOfKeyboard ? place : null;
    this.move(...place());
  },

  move(x, y) {
    const { width, height } = tip.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = x + 14 + width <= room - 6 ? x + 14 : x - 14 - width;
    tip.style.left = `${Math.max(6, Math.min(left, room - width - 6))}px`;
    tip.style.top = `${Math.max(6, Math.min(y - height - 10, innerHeight - height - 6))}px`;
  },

  hide() {
    tip.hidden = true;
    this.place = null;
  },
};

addEventListener("scroll", () => (Tip.place ? Tip.move(...Tip.place()) : Tip.hide()), { passive: true, capture: true });

const spoken = (title, rows) => `${title}: ${rows.map(({ name, value }) => `${name} ${value}`).join(", ")}`;
