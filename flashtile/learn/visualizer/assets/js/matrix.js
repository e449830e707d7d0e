// The score matrix on a canvas: queries downwards, keys to the right; Q's and K's and V's tiles at its edges.

const EDGE = 14; // pixels for the strips of Q and O on the left, of K and V on top
const CORNER = 12; // for the names of the strips on top
const MOST_LINES = 64;
const SHORTEST = 56;

class MatrixView {
  /** `choose(row)` is called when a row is clicked. */
  constructor(canvas, choose) {
    this.canvas = canvas;
    this.choose = choose;
    this.context = canvas.getContext("2d");
    this.cells = document.createElement("canvas");
    canvas.addEventListener("click", (event) => this.#click(event));
  }

  show(run) {
    this.run = run;
    this.canvas.hidden = run.grid === null;
    this.resize();
  }

  resize() {
    if (!this.run?.grid) return;
    const { grid, recording } = this.run;
    const side = this.canvas.parentElement.clientWidth;
    const ratio = (this.ratio = Math.min(window.devicePixelRatio || 1, 2));
    this.rows = grid.rowEdges.at(-1);
    this.cols = grid.colEdges.at(-1);
    const width = side - EDGE * 2 - CORNER - 1;
    const height = Math.max(Math.round((width * this.rows) / this.cols), SHORTEST);
    this.area = { left: EDGE * 2 + CORNER, top: EDGE * 2, width, height: Math.min(height, width) };
    this.canvas.style.height = `${this.area.top + this.area.height + 1}px`;
    this.canvas.width = side * ratio;
    this.canvas.height = (this.area.top + this.area.height + 1) * ratio;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.coloured = null;
    this.keysInOrder = this.run.trace.arrays.some(({ name, rows }) => name === "K" && rows === this.cols); // not in pages
    this.window = visibleWindow(recording.settings, this.rows, this.cols);
  }

  draw(position, tiles, colours, row) {
    if (!this.run?.grid) return;
    const { context, area } = this;
    context.clearRect(0, 0, area.left + area.width + 1, area.top + area.height + 1);
    this.#drawCells(position, colours);
    this.#drawMask(colours);
    this.#drawSplits(colours);
    this.#drawStrips(tiles, colours);
    this.#drawRow(row, colours);
    this.#drawCurrent(tiles, colours);
  }

  #x(col) {
    return this.area.left + (col / this.cols) * this.area.width;
  }

  #y(row) {
    return this.area.top + (row / this.rows) * this.area.height;
  }

  /** The cells are kept on a canvas of their own, on which only those are painted that have changed. */
  #drawCells(position, colours) {
    const { grid } = this.run;
    if (this.coloured !== colours) this.#forgetCells(colours);
    const paths = new Map();
    for (let y = 0, cell = 0; y < grid.height; y++) {
      for (let x = 0; x < grid.width; x++, cell++) {
        const state = grid.stateOf(cell, position);
        if (state === this.states[cell]) continue;
        this.states[cell] = state;
        const path = paths.get(state) ?? new Path2D();
        paths.set(state, path);
        const [left, top] = [this.cellX[x], this.cellY[y]];
        path.rect(left, top, Math.max(this.cellX[x + 1] - left - this.gap, 1), Math.max(this.cellY[y + 1] - top - this.gap, 1));
      }
    }
    const painter = this.cells.getContext("2d");
    for (const [state, path] of paths) {
      painter.fillStyle = colours[state];
      painter.fill(path);
    }
    this.context.drawImage(this.cells, 0, 0, this.canvas.width / this.ratio, this.canvas.height / this.ratio);
  }

  #forgetCells(colours) {
    const { grid } = this.run;
    this.coloured = colours;
    this.states = new Array(grid.height * grid.width);
    this.cells.width = this.canvas.width;
    this.cells.height = this.canvas.height;
    this.gap = Math.max(grid.width, grid.height) <= MOST_LINES ? 1 : 0;
    this.cellX = grid.colEdges.map((col) => Math.round(this.#x(col) * this.ratio)); // whole pixels, so that nothing shines through
    this.cellY = grid.rowEdges.map((row) => Math.round(this.#y(row) * this.ratio));
  }

  /** What the mask hides is shaded, whether or not an algorithm computes it. */
  #drawMask(colours) {
    const { left, right } = this.window;
    const { context, area, rows, cols } = this;
    if (left < 0 && right < 0) return;
    const offset = cols - rows;
    context.save();
    context.beginPath();
    context.rect(area.left, area.top, area.width, area.height);
    context.clip();
    context.fillStyle = colours.hidden;
    const shade = (corners) => {
      context.beginPath();
      for (const [row, col] of corners) context.lineTo(this.#x(col), this.#y(row));
      context.fill();
    };
    if (right >= 0) shade([[0, offset + right + 1], [rows, rows + offset + right + 1], [rows, 2 * cols], [0, 2 * cols]]);
    if (left >= 0) shade([[0, offset - left], [rows, rows + offset - left], [rows, -cols], [0, -cols]]);
    context.restore();
  }

  /** With one row of queries, where another program takes over. */
  #drawSplits(colours) {
    const { grid } = this.run;
    if (grid.height > 1) return;
    const { top, height } = this.area;
    this.context.fillStyle = colours.ink;
    for (let x = 1; x < grid.width; x++) {
      if (grid.programs[x] !== grid.programs[x - 1]) this.context.fillRect(this.#x(grid.colEdges[x]) - 1, top - 3, 2, height + 3);
    }
  }

  #drawStrips(tiles, colours) {
    const { context, area } = this;
    const strips = [
      { name: "Q", at: 0, vertical: true }, { name: "O", at: EDGE, vertical: true },
      { name: "K", at: 0, vertical: false }, { name: "V", at: EDGE, vertical: false },
    ];
    for (const { name, at, vertical } of strips.filter(({ vertical }) => vertical || this.keysInOrder)) {
      context.fillStyle = colours.track;
      if (vertical) context.fillRect(at + 2, area.top, EDGE - 4, area.height);
      else context.fillRect(area.left, at + 2, area.width, EDGE - 4);
      for (const tile of tilesOf(tiles, name)) {
        context.fillStyle = colours[name];
        if (vertical) context.fillRect(at + 2, this.#y(tile.row), EDGE - 4, this.#y(tile.row + tile.rows) - this.#y(tile.row));
        else context.fillRect(this.#x(tile.row), at + 2, this.#x(tile.row + tile.rows) - this.#x(tile.row), EDGE - 4);
      }
      context.fillStyle = colours.soft;
      context.font = "10px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      if (vertical) context.fillText(name, at + EDGE / 2, area.top - EDGE / 2);
      else context.fillText(name, area.left - CORNER / 2, at + EDGE / 2);
    }
  }

  #drawRow(row, colours) {
    if (row === undefined || row >= this.rows || this.rows === 1) return;
    const y = this.#y(row + 0.5);
    this.context.strokeStyle = colours.statistics;
    this.context.lineWidth = 1;
    this.context.setLineDash([4, 3]);
    this.context.beginPath();
    this.context.moveTo(this.area.left, y);
    this.context.lineTo(this.area.left + this.area.width, y);
    this.context.stroke();
    this.context.setLineDash([]);
  }

  /** The tiles of scores and probabilities that SRAM holds now. */
  #drawCurrent(tiles, colours) {
    for (const name of ["S", "P"]) {
      for (const tile of tilesOf(tiles, name)) this.#outline(tile, colours[name], colours.ink);
    }
  }

  #outline(tile, fill, ink) {
    const [left, top] = [this.#x(Math.max(tile.col, 0)), this.#y(tile.row)];
    const width = Math.max(this.#x(Math.max(tile.col, 0) + tile.cols) - left, 2);
    const height = Math.max(this.#y(tile.row + tile.rows) - top, 2);
    this.context.fillStyle = fill;
    this.context.fillRect(left, top, width, height);
    this.context.strokeStyle = ink;
    this.context.lineWidth = 1.5;
    this.context.strokeRect(left, top, width, height);
  }

  #click(event) {
    const y = event.offsetY - this.area.top;
    this.choose(Math.max(0, Math.floor((y / this.area.height) * this.rows)));
  }
}

/** Sides of the window of a recording's mask, -1 without a limit. */
function visibleWindow(settings) {
  const [left, right] = settings.window_size ?? [-1, -1];
  return { left, right: settings.mask === "causal" ? 0 : right };
}

/** The tiles of an array that SRAM holds and whose place is known. */
function tilesOf(tiles, array) {
  return [...tiles].filter(([name, tile]) => arrayOf(name) === array && tile.row >= 0).map(([, tile]) => tile);
}
