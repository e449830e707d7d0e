// The backward pass in numbers: a tile of P and of its gradients, and the sums dQ, dK and dV.

const NUMBER_CELL = 26;

class NumberGrid extends CellGrid {
  constructor(name, rows, cols) {
    super(name, rows, cols, NUMBER_CELL);
    this.texts = this.cells.map((cell) => svgElement("text", { x: Number(cell.getAttribute("x")) + NUMBER_CELL / 2 - 0.5, y: Number(cell.getAttribute("y")) + NUMBER_CELL / 2 + 2.5, "text-anchor": "middle" }));
    this.drawing.append(...this.texts);
  }

  /** `states`: of each cell [word of the style sheet, number]. */
  fill(states) {
    this.paint((row, col) => states[row * this.cols + col]?.[0] ?? "untouched");
    this.texts.forEach((text, i) => setText(text, formatCell(states[i]?.[1])));
  }
}

function formatCell(value) {
  if (value === undefined) return "";
  return value === 0 ? "0" : value.toFixed(Math.abs(value) < 10 ? 2 : 1).replace("-", "−");
}

STORY_VIEWS.backward = class {
  static counters = ["hbm_read", "hbm_written", "matmul_flops"];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts, text });
    const { seqlen, head_dim } = facts;
    const sizes = { S: seqlen, lse: 1, D: 1, dQ: head_dim, dK: head_dim, dV: head_dim };
    this.grids = Object.fromEntries(Object.entries(sizes).map(([name, cols]) => [name, new NumberGrid(name, seqlen, cols)]));
    this.heading = this.grids.S.root.querySelector("figcaption");
    root.classList.add("in-a-row", "of-numbers");
    root.append(...Object.values(this.grids).map((grid) => grid.root));
  }

  draw(position, last) {
    const states = Object.fromEntries(Object.entries(this.grids).map(([name, { rows, cols }]) => [name, new Array(rows * cols)]));
    this.facts.lse.forEach(([value], row) => (states.lse[row] = ["kept", value]));
    let shown = "P";
    for (let i = 0; i < position; i++) {
      const event = this.trace.event(i);
      const { kind, name, op } = event;
      const values = this.facts.numbers[i];
      if (name === "S" || name === "dS") {
        if (kind === "free") this.#put(states, "S", event, "computed");
        else if (kind === "compute") {
          this.#put(states, "S", event, "latest", values);
          shown = prettyOp(op);
        }
      } else if ((name === "D" || name === "dQ") && kind === "store") this.#put(states, name, event, name === "D" ? "kept" : "partial", values);
      else if (name === "dK" || name === "dV") {
        if (kind === "compute") this.#put(states, name, event, "latest", values);
        if (kind === "store") this.#put(states, name, event, "kept", values);
      }
    }
    setText(this.heading, shown);
    for (const [name, grid] of Object.entries(this.grids)) {
      grid.fill(states[name]);
      const touched = last && (last.name === name || (name === "S" && last.name === "dS")) && last.row >= 0 && last.kind !== "free" && !["place", "empty"].includes(last.kind);
      grid.mark(touched ? last : null);
    }
  }

  #put(states, name, { row, rows, col, cols }, word, values) {
    const wide = this.grids[name].cols;
    const [left, width] = col < 0 ? [0, wide] : [col, cols];
    for (let y = 0; y < rows; y++) for (let x = 0; x < width; x++) states[name][(row + y) * wide + left + x] = [word, values?.[y][x]];
  }

  caption(event) {
    const key = { "P = exp(S - lse)": "P", "dP = dO V^T": "dP", "dS = P (dP - D)": "dS", "dV += P^T dO": "dV", "dQ += dS K": "dQ", "dK += dS^T Q": "dK" }[event.op];
    const stored = event.kind === "store" && ["D", "dQ", "dK", "dV"].includes(event.name) && `stored_${event.name === "D" ? "D" : event.name === "dQ" ? "dQ" : "rows"}`;
    const said = key ? `computed_${key}` : { place: "placed", empty: "room" }[event.kind] ?? stored;
    return said ? this.text(said, { rows: formatRange(event.row, event.rows), name: event.name }) : null;
  }
};
