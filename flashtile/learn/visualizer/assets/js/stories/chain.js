// The matrix between two products, and the output that is a sum over its tiles.

STORY_VIEWS.chain = class {
  static counters = ["hbm_read", "hbm_written", "hbm_peak", "matmul_flops"];

  constructor({ root, trace, facts, name }) {
    this.trace = trace;
    const { seqlen, head_dim } = facts;
    const middle = name === "reordered" ? ["KV", head_dim, head_dim] : ["S", seqlen, seqlen];
    this.parts = [middle, ["O", seqlen, head_dim]].map(([array, rows, cols]) => ({
      array, grid: new CellGrid(array === "KV" ? "KᵀV" : array, rows, cols),
      computed: new FirstTouch(trace, array, ["compute"], rows, cols),
      stored: new FirstTouch(trace, array, ["store"], rows, cols),
    }));
    root.classList.add("in-a-row");
    root.append(...this.parts.map(({ grid }) => grid.root));
  }

  draw(position) {
    const tiles = this.trace.tilesAt(position);
    for (const { array, grid, computed, stored } of this.parts) {
      const known = array === "O" ? "partial" : "computed";
      grid.paint((row, col) => (stored.before(position, row, col) ? "stored" : computed.before(position, row, col) ? known : "untouched"));
      grid.mark(tiles.get(array));
    }
  }

  numbers(position) {
    const [middle] = this.parts;
    return { middle: [this.trace.trafficAt(middle.array, position).written, formatBytes] };
  }
};
