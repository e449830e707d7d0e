// A matrix as cells, for pictures whose numbers are few enough to be seen one by one.

class CellGrid {
  /** `each` is a cell's side, in units of the drawing. */
  constructor(name, rows, cols, each = 10) {
    Object.assign(this, { rows, cols, each });
    const width = cols * each + 1;
    const height = rows * each + 1;
    this.cells = [];
    this.drawing = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
    for (let cell = 0; cell < rows * cols; cell++) {
      const [x, y] = [(cell % cols) * each + 1, Math.floor(cell / cols) * each + 1];
      this.cells.push(svgElement("rect", { x, y, width: each - 1, height: each - 1 }));
    }
    this.frame = svgElement("rect", { class: "outline", visibility: "hidden" });
    this.drawing.append(...this.cells, this.frame);
    this.root = element("figure", { class: "cells", "data-grid": name, style: `--cols:${cols};flex:${cols} 1 0` }, element("figcaption", {}, name), this.drawing);
    this.states = new Array(rows * cols).fill(undefined);
  }

  /** `stateOf(row, col)` is the state of a cell: a word of the style sheet, or [word, hue]. */
  paint(stateOf) {
    for (let cell = 0; cell < this.cells.length; cell++) {
      const state = stateOf(Math.floor(cell / this.cols), cell % this.cols);
      const key = String(state);
      if (this.states[cell] === key) continue;
      this.states[cell] = key;
      const [word, hue] = Array.isArray(state) ? state : [state];
      this.cells[cell].setAttribute("class", word);
      if (hue !== undefined) this.cells[cell].style.setProperty("--hue", hue);
    }
  }

  /** A frame around the tile that is held now; none without a tile. */
  mark(tile) {
    this.frame.setAttribute("visibility", tile ? "visible" : "hidden");
    if (!tile) return;
    const { each } = this;
    const [top, rows] = tile.row < 0 ? [0, this.rows] : [tile.row, tile.rows];
    const [left, cols] = tile.col < 0 ? [0, this.cols] : [tile.col, tile.cols];
    const place = { x: left * each + 0.5, y: top * each + 0.5, width: cols * each, height: rows * each };
    for (const [name, value] of Object.entries(place)) this.frame.setAttribute(name, value);
  }

  /** How many cells are in each state. */
  count(word) {
    return this.states.filter((state) => state?.split(",")[0] === word).length;
  }
}

/** For each number of a matrix the first event of some kinds that touched it. */
class FirstTouch {
  constructor(trace, array, kinds, rows, cols) {
    this.cols = cols;
    this.at = new Uint32Array(rows * cols).fill(NEVER);
    for (let i = 0; i < trace.length; i++) {
      const form = trace.forms[trace.form[i]];
      if (form.array !== array || !kinds.includes(form.kind)) continue;
      const [top, height] = trace.row[i] < 0 ? [0, rows] : [trace.row[i], form.rows];
      const [left, width] = trace.col[i] < 0 ? [0, cols] : [trace.col[i], form.cols];
      for (let row = top; row < top + height; row++) {
        for (let col = left; col < left + width; col++) this.at[row * cols + col] = Math.min(this.at[row * cols + col], i);
      }
    }
  }

  before(position, row, col) {
    return this.at[row * this.cols + col] < position;
  }
}
