// A recorded run: its events, and what is true after the first `i` of them. Position 0 is before the first event.

const KEYFRAME = 256; // events between two remembered contents of SRAM
const HOLDS = new Set(["load", "compute"]);

/** The array that a tile is of: warpgroups and pipeline stages have tiles of their own, named K.0, K.1, ... */
function arrayOf(name) {
  return name.split(".")[0];
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function undoDifferences(differences) {
  const numbers = new Int32Array(differences.length);
  let number = 0;
  differences.forEach((difference, i) => (numbers[i] = number += difference));
  return numbers;
}

/** How many of the ascending `numbers` are at most `limit`. */
function countUpTo(numbers, limit) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Trace {
  constructor(packed) {
    this.forms = packed.forms.map(([kind, name, kernel, op, bytes, matmul, other, rows, cols]) => ({
      kind, name, array: arrayOf(name), kernel, op, bytes, matmul, other, rows, cols,
    }));
    this.form = undoDifferences(packed.form);
    this.row = undoDifferences(packed.row);
    this.col = undoDifferences(packed.col);
    this.program = undoDifferences(packed.program);
    this.length = this.form.length;
    this.series = packed.series.map((s) => ({ ...s, at: undoDifferences(s.at), value: s.value.map(Number) }));
    this.data = packed.data;
    this.spans = packed.spans.map(([worker, unit, label, block, start, end]) => ({
      worker, unit, label, block, start, end,
    }));
    this.#addUp();
  }

  /** Event `i` of 0 to length - 1, with where it happened. */
  event(i) {
    return { ...this.forms[this.form[i]], row: this.row[i], col: this.col[i], program: this.program[i] };
  }

  #addUp() {
    const column = () => new Float64Array(this.length + 1);
    Object.assign(this, {
      read: column(), written: column(), matmul: column(), other: column(),
      sramUsed: column(), sramPeak: column(), hbmUsed: column(), hbmPeak: column(),
    });
    this.traffic = new Map(); // array -> positions after which its running sums of read and written hold
    this.arrays = []; // what is in HBM: name, rows, cols, bytes, from and until which position
    this.keyframes = [];
    const tiles = new Map();
    for (let i = 0; i < this.length; i++) {
      if (i % KEYFRAME === 0) this.keyframes.push(new Map(tiles));
      const event = this.event(i);
      const before = { sram: this.sramUsed[i], hbm: this.hbmUsed[i] };
      const held = tiles.get(event.name)?.bytes ?? 0;
      changeTiles(tiles, event);
      const after = tiles.get(event.name)?.bytes ?? 0;
      this.sramUsed[i + 1] = before.sram + after - held;
      this.hbmUsed[i + 1] = before.hbm + this.#changeArrays(event, i);
      this.read[i + 1] = this.read[i] + (event.kind === "load" ? event.bytes : 0);
      this.written[i + 1] = this.written[i] + (event.kind === "store" ? event.bytes : 0);
      this.matmul[i + 1] = this.matmul[i] + event.matmul;
      this.other[i + 1] = this.other[i] + event.other;
      this.sramPeak[i + 1] = Math.max(this.sramPeak[i], this.sramUsed[i + 1]);
      this.hbmPeak[i + 1] = Math.max(this.hbmPeak[i], this.hbmUsed[i + 1]);
      if (event.kind === "load" || event.kind === "store") this.#countTraffic(event, i);
    }
    this.moved = this.read.map((read, i) => read + this.written[i]);
  }

  #changeArrays(event, i) {
    if (event.kind === "place" || event.kind === "empty") {
      this.arrays.push({ name: event.name, rows: event.rows, cols: event.cols, bytes: event.bytes, from: i + 1, until: Infinity });
      return event.bytes;
    }
    if (event.kind !== "release") return 0;
    this.arrays.findLast((array) => array.name === event.name).until = i + 1;
    return -event.bytes;
  }

  #countTraffic(event, i) {
    const known = this.traffic.get(event.array) ?? { at: [], read: [0], written: [0] };
    this.traffic.set(event.array, known);
    known.at.push(i + 1);
    known.read.push(known.read.at(-1) + (event.kind === "load" ? event.bytes : 0));
    known.written.push(known.written.at(-1) + (event.kind === "store" ? event.bytes : 0));
  }

  /** What SRAM holds: name -> {bytes, row, rows, col, cols}, in the order in which the names came. */
  tilesAt(position) {
    const frame = Math.min(Math.floor(position / KEYFRAME), this.keyframes.length - 1);
    const tiles = new Map(this.keyframes[frame]);
    for (let i = frame * KEYFRAME; i < position; i++) changeTiles(tiles, this.event(i));
    return tiles;
  }

  arraysAt(position) {
    return this.arrays.filter((array) => array.from <= position && position < array.until);
  }

  trafficAt(name, position) {
    const known = this.traffic.get(name);
    if (!known) return { read: 0, written: 0 };
    const count = countUpTo(known.at, position);
    return { read: known.read[count], written: known.written[count] };
  }

  /** The value of a statistic of a watched row, undefined before it has one. */
  valueAt(series, position) {
    const count = countUpTo(series.at, position - 1);
    return count === 0 ? undefined : series.value[count - 1];
  }

  /** Rows of which one of the named statistics was recorded. */
  rowsOf(names) {
    const rows = this.series.filter(({ name }) => names.includes(arrayOf(name))).map(({ row }) => row);
    return [...new Set(rows)].sort((a, b) => a - b);
  }

  /** The last of the entries of `data` up to a position, such as the block tables. */
  dataAt(position) {
    return this.data.findLast(([number]) => number < position)?.[1];
  }

  /** The next position, forwards or backwards, at which work on another tile of scores has begun. */
  nextTile(position, direction) {
    for (let i = position + direction; i > 0 && i < this.length; i += direction) {
      if (this.#beginsTile(i - 1)) return i;
    }
    return direction > 0 ? this.length : 0;
  }

  #beginsTile(i) {
    const { array, kind } = this.forms[this.form[i]];
    if (array !== "S" || (kind !== "compute" && kind !== "skip")) return false;
    let before = i - 1;
    while (before >= 0 && this.forms[this.form[before]].array !== "S") before--;
    return before < 0 || this.row[before] !== this.row[i] || this.col[before] !== this.col[i];
  }
}

/** Room for sums that start at zero: nothing has been computed yet. */
function isEmpty({ kind, op }) {
  return kind === "compute" && op === "";
}

function changeTiles(tiles, event) {
  if (HOLDS.has(event.kind)) {
    tiles.set(event.name, {
      bytes: event.bytes, row: event.row, rows: event.rows, col: event.col, cols: event.cols, program: event.program, empty: isEmpty(event),
    });
  } else if (event.kind === "free") {
    tiles.delete(event.name);
  }
}
