// Ticks of axes, and their labels.

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
