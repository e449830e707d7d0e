// A row in blocks: the block in SRAM, a bar for each weight exp(x - m) so far, their sum l, and the result.

STORY_VIEWS.softmax = class {
  static counters = ["hbm_read", "hbm_written", "other_flops"];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts, text });
    this.passes = trace.sumOf((form, i) => (form.kind === "load" && form.name === "X" && trace.col[i] === 0 ? 1 : 0));
    this.written = new FirstTouch(trace, facts.v ? "O" : "Y", ["store"], 1, facts.result.length);
    const strip = (name, values, holder = root) => {
      const cells = values.map((value) => element("span", {}, formatStatistic(value)));
      holder.append(element("p", { class: "strip-of-cells", "data-strip": name }, element("b", {}, name), ...cells));
      return cells;
    };
    this.x = strip("x", facts.x);
    if (facts.v) this.v = strip("v", facts.v);
    const hasMaximum = trace.series.some(({ name }) => name === "m");
    const bars = (of) => of.map(() => element("i"));
    [this.bars, this.parts] = [bars(facts.x), bars(facts.x)];
    this.factor = element("em");
    root.append(element("div", { class: "weight-bars", "aria-hidden": "true" },
      element("b", {}, hasMaximum ? "exp(x\u2060−\u2060m)" : "exp(x)"), ...this.bars.map((bar) => element("span", {}, bar)), element("span", { class: "sum" }, ...this.parts), this.factor));
    const row = element("div", { class: "statistics-of-row" });
    root.append(row);
    this.m = hasMaximum ? strip("m", [undefined], row)[0] : null;
    this.l = strip("l", [undefined], row)[0];
    if (facts.v) this.acc = strip("O", [undefined], row)[0];
    this.y = strip(facts.v ? text("average") : "softmax", facts.result.map(() => undefined));
    this.#addUp();
  }

  /** After each event: how many scores the sum has, with which maximum, and by what the last step corrected it. */
  #addUp() {
    const { trace } = this;
    let [seen, maximum, factor] = [0, undefined, null];
    this.states = [{ seen, maximum, factor }];
    for (let i = 0; i < trace.length; i++) {
      const { name, kind, op } = trace.event(i);
      if (kind === "load" && name === "X") factor = null;
      if (kind === "compute" && name === "m") maximum = trace.statistic("m", i + 1);
      if (kind === "compute" && name === "l") {
        const tile = trace.tilesAt(i).get("X");
        seen = op && tile ? tile.col + tile.cols : 0;
        const next = i + 1 < trace.length ? trace.event(i + 1) : null; // the new maximum is kept right after the sum
        if (op.includes("m'") && next?.name === "m") {
          const after = trace.statistic("m", i + 2);
          if (maximum > -1e38 && after !== maximum) factor = { from: maximum, to: after };
          maximum = after;
        }
      }
      this.states.push({ seen, maximum, factor });
    }
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
    this.#drawWeights(this.states[position]);
    this.y.forEach((cell, i) => {
      const value = this.written.before(position, 0, i) ? facts.result[i] : undefined;
      cell.dataset.value = value ?? "";
      cell.classList.toggle("wrong", value === "nan");
      setText(cell, typeof value === "number" && !facts.v ? threeDigits(value) : typeof value === "string" ? value : formatStatistic(value));
    });
  }

  /** Without a maximum, bars are drawn to the scale of the largest. */
  #drawWeights({ seen, maximum, factor }) {
    const { x } = this.facts;
    const top = this.m ? maximum : Math.min(Math.max(...x), 88); // exp(89) is no number of float32
    const heights = x.map((value, i) => (i < seen ? Math.min(Math.exp(value - top), 1) : 0));
    let below = 0;
    heights.forEach((height, i) => {
      this.bars[i].classList.toggle("wrong", i < seen && !this.m && x[i] > 88);
      setStyle(this.bars[i], "transform", `scaleY(${height.toFixed(4)})`);
      setStyle(this.parts[i], "transform", `translateY(${(-100 * below).toFixed(2)}%) scaleY(${height.toFixed(4)})`);
      below += height;
    });
    setText(this.factor, factor ? this.text("factor", { from: factor.from, to: factor.to, factor: formatStatistic(Math.exp(factor.from - factor.to)) }) : "");
  }

  numbers(position) {
    return { passes: [this.passes[position], String] };
  }
};
