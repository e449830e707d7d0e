// A row in blocks: the block in SRAM, the maximum and sum so far, the result as it is written.

STORY_VIEWS.softmax = class {
  static counters = ["hbm_read", "hbm_written", "other_flops"];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts });
    this.passes = trace.sumOf((form, i) => (form.kind === "load" && form.name === "X" && trace.col[i] === 0 ? 1 : 0));
    this.written = new FirstTouch(trace, facts.v ? "O" : "Y", ["store"], 1, facts.result.length);
    const strip = (name, values) => {
      const cells = values.map((value) => element("span", {}, formatStatistic(value)));
      root.append(element("p", { class: "strip-of-cells", "data-strip": name }, element("b", {}, name), ...cells));
      return cells;
    };
    this.x = strip("x", facts.x);
    if (facts.v) this.v = strip("v", facts.v);
    this.m = trace.series.some(({ name }) => name === "m") ? strip("m", [undefined])[0] : null;
    this.l = strip("l", [undefined])[0];
    if (facts.v) this.acc = strip("O", [undefined])[0];
    this.y = strip(facts.v ? text("average") : "softmax", facts.result.map(() => undefined));
  }

  draw(position) {
    const { trace, facts } = this;
    const tile = trace.tilesAt(position).get("X");
    for (const cells of [this.x, this.v ?? []]) {
      cells.forEach((cell, i) => cell.classList.toggle("held", Boolean(tile) && tile.col <= i && i < tile.col + tile.cols));
    }
    for (const [name, cell] of [["m", this.m], ["l", this.l], ["O", this.acc]]) {
      if (!cell) continue;
      const value = trace.statistic(name, position);
      cell.dataset.value = value ?? "";
      setText(cell, formatStatistic(value));
    }
    this.y.forEach((cell, i) => {
      const value = this.written.before(position, 0, i) ? facts.result[i] : undefined;
      cell.dataset.value = value ?? "";
      cell.classList.toggle("wrong", value === "nan");
      setText(cell, typeof value === "string" ? value : formatStatistic(value));
    });
  }

  numbers(position) {
    return { passes: [this.passes[position], String] };
  }
};
