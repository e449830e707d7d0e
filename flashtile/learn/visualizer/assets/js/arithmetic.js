// One tile's arithmetic, every number of it: Q, K, V, S, P, and m, l, O before and after. Runs that the page makes have them.

const MOST_ROWS = 8; // of a table; a larger tile shows its first ones
const SHOWN = ["Q", "K", "S", "P", "V", "m before", "m after", "l before", "l after", "O before", "O after"];

/** The matrices of the tile at a position by name; null where the trace has no numbers, or no tiles with statistics. */
function tileNumbers(trace, position) {
  const start = trace.numbers?.some(Boolean) ? beginningOfTile(trace, position) : -1;
  const event = start < 0 ? null : trace.event(start);
  if (event?.op !== "S = Q K^T") return null;
  const find = (is, from, step) => {
    for (let i = from; i >= 0 && i < trace.length; i += step) {
      const other = trace.event(i);
      if (is(other)) return trace.numbers[i];
      if (step > 0 && i > from && other.op === "S = Q K^T") return null;
    }
    return null;
  };
  const mine = (name) => (other) => other.name === name && ["load", "compute"].includes(other.kind) && other.row === event.row;
  const computed = (name) => (other) => mine(name)(other) && other.kind === "compute";
  const keys = (name) => (other) => other.name === name && other.kind === "load" && other.row === event.col;
  const found = {
    Q: find(mine("Q"), start, -1), K: find(keys("K"), start, -1), V: find(keys("V"), start, -1), S: trace.numbers[start],
    P: find(({ op }) => op === "P = exp(S - m)", start, 1),
  };
  for (const name of ["m", "l", "O"]) {
    found[`${name} before`] = find(mine(name), start, -1);
    found[`${name} after`] = find(computed(name), start, 1);
  }
  return { start, row: event.row, col: event.col, found };
}

class ArithmeticView {
  /** `toggled(open)` is called when the reader opens or closes it. */
  constructor(root, language, toggled) {
    this.root = root.querySelector(".arithmetic");
    this.tables = this.root.querySelector(".tables");
    this.language = language;
    this.root.querySelector("summary").addEventListener("click", (event) => {
      event.preventDefault();
      toggled(!this.root.open);
    });
  }

  show({ trace, recording }) {
    this.trace = trace;
    this.shown = undefined;
    this.root.hidden = !(recording.algorithm in MADE) || recording.algorithm === "standard";
    this.tables.replaceChildren();
  }

  draw(position) {
    this.position = position;
    if (!this.trace || this.root.hidden || !this.root.open) return;
    const tile = tileNumbers(this.trace, position);
    if (this.shown === (tile?.start ?? -1)) return;
    this.shown = tile?.start ?? -1;
    if (!tile) return this.tables.replaceChildren(element("p", {}, this.language.text("arithmetic_none")));
    this.tables.replaceChildren(...SHOWN.map((name) => this.#table(name, tile)));
  }

  #table(name, { row, col, found }) {
    const [array, when] = name.split(" ");
    const numbers = found[name];
    const first = "KV".includes(array) ? col : row;
    const caption = when ? `${array}, ${this.language.text(when)}` : array === "S" ? "S = Q Kᵀ · scale" : array === "P" ? "P = exp(S − m′)" : array;
    const lines = (numbers ?? []).slice(0, MOST_ROWS).map((line, i) =>
      element("tr", {}, element("th", { scope: "row" }, String(first + i)), ...line.slice(0, MOST_ROWS).map((x) => element("td", { "data-value": x }, formatStatistic(x)))));
    const cut = numbers && (numbers.length > MOST_ROWS || numbers[0].length > MOST_ROWS) ? [element("tfoot", {}, element("tr", {}, element("td", {}, "…")))] : [];
    return element("table", { "data-matrix": name, style: `--colour:var(${colourName(array)})` }, element("caption", {}, caption), element("tbody", {}, ...lines), ...cut);
  }
}
