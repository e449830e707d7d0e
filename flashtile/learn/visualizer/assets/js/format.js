// Numbers for people.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const COUNT_UNITS = ["", "k", "M", "G", "T", "P"];

function inUnits(value, step, units) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) {
    value /= step;
    unit++;
  }
  return [threeDigits(value), units[unit]];
}

function threeDigits(value) {
  if (Number.isInteger(value) && Math.abs(value) < 1000) return String(value);
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function formatBytes(bytes) {
  return inUnits(bytes, 1024, BYTE_UNITS).join("\u202f");
}

/** A count with thin spaces between thousands. */
function formatCount(count) {
  return String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

function formatFlops(flops) {
  const [number, unit] = inUnits(flops, 1000, COUNT_UNITS);
  return `${number}\u202f${unit}FLOP`;
}

function formatSeconds(seconds) {
  if (seconds === 0) return "0";
  const [factor, unit] = seconds < 1e-6 ? [1e9, "ns"] : seconds < 1e-3 ? [1e6, "µs"] : [1e3, "ms"];
  return `${threeDigits(seconds * factor)}\u202f${unit}`;
}

function formatRatio(ratio) {
  return `${ratio >= 10 ? ratio.toFixed(0) : ratio.toFixed(ratio >= 2 ? 1 : 2)}×`;
}

/** A statistic of a row: undefined before it has a value. */
function formatStatistic(value) {
  if (value === undefined) return "–";
  if (value < -1e38) return "−∞";
  if (value === Infinity) return "+∞";
  return Number(value.toPrecision(4)).toString().replace("-", "−");
}

/** "[64, 128)" for a range, nothing where an event has none. */
function formatRange(start, size) {
  return start < 0 ? "" : size === 1 ? `${start}` : `${start}–${start + size - 1}`;
}
