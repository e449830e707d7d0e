// A, B and C: the tiles of the thread block in shared memory, of the warp in registers, what is finished.

STORY_VIEWS.matmul = class {
  static counters = ["hbm_read", "hbm_written", "shared_read", "barriers", "matmul_flops", "other_flops"];

  constructor({ root, trace, facts }) {
    this.trace = trace;
    const { size } = facts;
    this.grids = Object.fromEntries(["A", "B", "C"].map((name) => [name, new CellGrid(name, size, size)]));
    this.summed = new FirstTouch(trace, "C", ["register"], size, size);
    this.stored = new FirstTouch(trace, "C", ["store"], size, size);
    root.classList.add("in-a-row");
    root.append(...Object.values(this.grids).map((grid) => grid.root));
  }

  draw(position, event) {
    const tiles = this.trace.tilesAt(position);
    for (const name of ["A", "B"]) {
      const tile = tiles.get(name);
      this.grids[name].paint((row, col) => (covers(tile, row, col) ? "held" : "hbm"));
      this.grids[name].mark(event?.kind === "shared_load" && event.array === name ? event : null);
    }
    this.grids.C.paint((row, col) =>
      this.stored.before(position, row, col) ? "stored" : this.summed.before(position, row, col) ? "partial" : "untouched");
    this.grids.C.mark(event?.kind === "register" || event?.name === "C" ? event : null);
  }

  numbers() {
    return { finished: [this.grids.C.count("stored"), String] };
  }
};

function covers(tile, row, col) {
  return Boolean(tile) && tile.row <= row && row < tile.row + tile.rows && tile.col <= col && col < tile.col + tile.cols;
}
