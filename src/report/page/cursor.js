// The step that is looked at: one for all charts of the page.

function nearest(places, place) {
  let low = 0;
  let high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < place) low = middle; else high = middle;
  }
  return Math.abs(places[high] - place) < Math.abs(places[low] - place) ? high : low;
}

class Cursor {
  // sharesTip: the tip has the values of all charts, not only of the one that is pointed at.
  constructor(sharesTip) {
    this.sharesTip = sharesTip;
    this.charts = [];
    this.step = null; // while it is shown
    this.lastStep = null; // where the keyboard goes on from
  }

  add(chart) {
    this.charts.push(chart);
    return chart;
  }

  // place: see Tip.show.
  show(source, step, place, isOfKeyboard) {
    this.step = this.lastStep = step;
    for (const chart of this.charts) chart.mark(step);
    const title = source.title(step);
    Tip.show(title, this.charts.flatMap((chart) => {
      if (chart === source) return chart.rows(step);
      return this.sharesTip ? chart.briefRows(step) : [];
    }), place, isOfKeyboard);
    fill(source.host, { "aria-valuenow": step, "aria-valuetext": spoken(title, source.rows(step)) });
  }

  hide() {
    this.step = null;
    for (const chart of this.charts) chart.unmark();
    Tip.hide();
  }
}
