// Numbers as people read them.

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
