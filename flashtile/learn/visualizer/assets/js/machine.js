// The papers' machine, as flashtile/learn/algorithms/memory.py has it: small runs are made here, event for event what Python records.

const LOWEST = -3.4028234663852886e38; // where a running maximum starts
const FIELDS = ["form", "row", "col", "program"];

class Machine {
  constructor(elementBytes, sramBytes) {
    Object.assign(this, { elementBytes, sramElements: Math.floor(sramBytes / elementBytes), kernel: "", matmul: 0, other: 0 });
    this.programs = new Map();
    this.tiles = new Map();
    this.forms = new Map();
    this.columns = Object.fromEntries(FIELDS.map((field) => [field, []]));
    this.numbers = []; // of each event: a matrix, or null
    this.series = new Map();
  }

  place(name, rows, cols, numbers) {
    return this.#appear("place", name, rows, cols, numbers);
  }

  empty(name, rows, cols) {
    return this.#appear("empty", name, rows, cols, null);
  }

  release(array) {
    this.record("release", array.name, null, null, array.rows * array.cols * this.elementBytes);
  }

  #appear(kind, name, rows, cols, numbers) {
    this.record(kind, name, [0, rows], [0, cols], rows * cols * this.elementBytes, "", numbers);
    return { name, rows, cols, numbers: numbers ?? Array.from({ length: rows }, () => []) };
  }

  /** Operations since the event before. */
  count(matmul, other) {
    this.matmul += matmul;
    this.other += other;
  }

  /** What one thread block does. */
  program(kernel, body) {
    this.kernel = kernel;
    this.programs.set(kernel, (this.programs.get(kernel) ?? -1) + 1);
    this.scope(body);
  }

  /** Tiles that are freed at the end. */
  scope(body) {
    const scope = new Scope(this);
    body(scope);
    scope.end();
  }

  record(kind, name, rows, cols, bytes, op = "", numbers = null) {
    const form = [kind, name, this.kernel, op, bytes, this.matmul, this.other, rows ? rows[1] - rows[0] : 0, cols ? cols[1] - cols[0] : 0];
    const key = form.join("\n");
    if (!this.forms.has(key)) this.forms.set(key, { number: this.forms.size, form });
    const entry = [this.forms.get(key).number, rows ? rows[0] : -1, cols ? cols[0] : -1, this.programs.get(this.kernel) ?? 0];
    FIELDS.forEach((field, i) => this.columns[field].push(entry[i]));
    [this.matmul, this.other] = [0, 0];
    if (numbers && STATISTICS.includes(name)) numbers.forEach(([value], i) => this.#watch(name, rows[0] + i, value));
    this.numbers.push(numbers);
  }

  /** A statistic of a row, where it changes. */
  #watch(name, row, value) {
    const key = `${name} ${row}`;
    if (!this.series.has(key)) this.series.set(key, { name, row, at: [], value: [] });
    const { at, value: known } = this.series.get(key);
    if (known.length && known.at(-1) === value) return;
    at.push(this.numbers.length);
    known.push(value);
  }

  /** What a recording unpacks to, with the numbers of each event. */
  trace() {
    const differences = (all) => all.map((number, i) => number - (i ? all[i - 1] : 0));
    const columns = Object.fromEntries(FIELDS.map((field) => [field, differences(this.columns[field])]));
    const series = [...this.series.values()].map((one) => ({ ...one, at: differences(one.at) }));
    const trace = new Trace({ forms: [...this.forms.values()].map(({ form }) => form), ...columns, series, data: [], spans: [] });
    trace.numbers = this.numbers;
    return trace;
  }
}

class Scope {
  constructor(machine) {
    this.machine = machine;
    this.names = [];
  }

  /** A tile of an array; ranges are [start, end). */
  load(array, rows = [0, array.rows], cols = [0, array.cols]) {
    const tile = array.numbers[rows[0]]?.length ? array.numbers.slice(...rows).map((row) => row.slice(...cols)) : null;
    const bytes = (rows[1] - rows[0]) * (cols[1] - cols[0]) * this.machine.elementBytes;
    this.#hold(array.name, { bytes, rows, cols });
    this.machine.record("load", array.name, rows, cols, bytes, "", tile);
    return tile;
  }

  /** Keep what was computed, (height, width): a column has no `cols`. */
  compute(name, numbers, rows, cols, op = "") {
    const bytes = (rows[1] - rows[0]) * (cols ? cols[1] - cols[0] : 1) * this.machine.elementBytes;
    return this.#computed(name, numbers, rows, cols, op, bytes);
  }

  /** The same for rows of an array, which are all of its columns wide. */
  accumulate(name, width, numbers, rows, op = "") {
    return this.#computed(name, numbers, rows, null, op, (rows[1] - rows[0]) * width * this.machine.elementBytes);
  }

  #computed(name, numbers, rows, cols, op, bytes) {
    this.#hold(name, { bytes, rows, cols });
    this.machine.record("compute", name, rows, cols, bytes, op, numbers);
    return numbers;
  }

  store(array, numbers, rows, cols = [0, array.cols]) {
    numbers?.forEach((row, i) => row.forEach((value, j) => (array.numbers[rows[0] + i][cols[0] + j] = value)));
    this.machine.record("store", array.name, rows, cols, (rows[1] - rows[0]) * (cols[1] - cols[0]) * this.machine.elementBytes, "", numbers);
  }

  #hold(name, tile) {
    if (!this.machine.tiles.has(name)) this.names.push(name);
    this.machine.tiles.set(name, tile);
  }

  end() {
    for (const name of this.names) {
      const { bytes, rows, cols } = this.machine.tiles.get(name);
      this.machine.tiles.delete(name);
      this.machine.record("free", name, rows, cols, bytes);
    }
  }
}
