// The score matrix in blocks: skipped, computed under the mask, computed without.

STORY_VIEWS.masks = class {
  static counters = ["hbm_read", "matmul_flops", "other_flops"];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts });
    const { seqlen, block } = facts;
    const count = (holds) => trace.sumOf((form) => (form.name === "S" && holds(form) ? 1 : 0));
    this.skips = count((form) => form.kind === "skip");
    this.products = count((form) => form.op === "Q K^T");
    this.masked = count((form) => form.op === "mask(S)");
    this.grid = new CellGrid("S", seqlen / block, seqlen / block);
    this.states = new Map(); // of each block: [event, state], the last of which is what it is
    for (let i = 0; i < trace.length; i++) {
      const { name, kind, op, row, col } = trace.event(i);
      if (name !== "S" || kind === "free" || !(kind === "skip" || op === "Q K^T" || op === "mask(S)")) continue;
      const state = kind === "skip" ? "skipped" : op === "Q K^T" ? "computed" : "partial";
      const cell = (row / block) * this.grid.cols + col / block;
      this.states.set(cell, [...(this.states.get(cell) ?? []), [i, state]]);
    }
    const key = ["skipped", "partial", "computed"].map((state) => element("span", {}, element("i", { class: state }), ` ${text(`key_${state}`)}`));
    root.append(this.grid.root, element("p", { class: "key" }, ...key));
  }

  draw(position, event) {
    const { block } = this.facts;
    this.grid.paint((row, col) => {
      const passed = (this.states.get(row * this.grid.cols + col) ?? []).filter(([at]) => at < position);
      return passed.length ? passed.at(-1)[1] : "untouched";
    });
    const tile = event?.name === "S" && event.row >= 0 ? event : null;
    this.grid.mark(tile && { row: tile.row / block, col: tile.col / block, rows: tile.rows / block, cols: tile.cols / block });
  }

  numbers(position) {
    const [skipped, partial] = [this.skips[position], this.masked[position]];
    return {
      skipped: [skipped, String], partial: [partial, String], full: [this.products[position] - partial, String],
      masked: [partial * this.facts.block ** 2, String],
    };
  }
};
