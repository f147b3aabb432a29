// The controls of the curves: how much they are smoothed, and the scale of the loss.

// charts: all of the page, null where the log has no such curve.
function addControls(box, charts, range) {
  const amounts = amountsFor(range.high - range.low);
  const smoothable = charts.filter((chart) => chart && (chart.spec.series || []).some(({ isSmoothed }) => isSmoothed));
  if (smoothable.length && amounts.length > 1) box.append(smoothingControl(smoothable, amounts, usualAmount(range.high - range.low)));
  box.append(logControl(charts[0]));
}

function smoothingControl(charts, amounts, usual) {
  const slider = element("input", {
    id: "smoothing", type: "range", min: 0, max: amounts.length - 1, step: 1, value: amounts.indexOf(usual) });
  const shown = element("output", { for: "smoothing" });
  const take = () => {
    const amount = amounts[slider.value];
    shown.textContent = amount ? `over ${count(amount)} steps` : "off";
    slider.setAttribute("aria-valuetext", shown.textContent);
    for (const chart of charts) {
      chart.amount = amount;
      chart.draw();
    }
  };
  slider.addEventListener("input", take);
  take();
  return element("span", { class: "smoothing" }, element("label", { for: "smoothing" }, "smoothing"), slider, shown);
}

function logControl(loss) {
  const button = element("button", { id: "log-scale", type: "button", "aria-pressed": false }, "log scale");
  button.disabled = !loss;
  button.addEventListener("click", () => {
    loss.isLog = !loss.isLog;
    button.setAttribute("aria-pressed", loss.isLog);
    loss.draw();
  });
  return button;
}
