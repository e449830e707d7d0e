// A sum of FP8 products in a register of few bits: what each instruction adds, which of its bits are cut off, the error.

const BITS_COLUMNS = 24; // those of fp32
const BIT = { width: 22, high: 26, gap: 12 };
const ERROR_PLOT = { width: 300, height: 96 };

STORY_VIEWS.sums = class {
  static counters = [];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts, text });
    const narrow = innerWidth <= 900; // names are above the bits, and the error is below them
    const left = narrow ? 0 : 112;
    const line = BIT.high + (narrow ? 20 : BIT.gap);
    const bitsWide = BITS_COLUMNS * BIT.width;
    const rows = ["added", "register", ...(facts.promote ? ["total"] : [])];
    this.rows = rows.map((name, row) => {
      const y = row * line + (narrow ? 18 : 4);
      const boxes = Array.from({ length: BITS_COLUMNS }, (_, i) => {
        const x = left + i * BIT.width;
        return svgElement("g", {}, svgElement("rect", { x: x + 0.5, y, width: BIT.width - 2, height: BIT.high, rx: 2 }), svgElement("text", { x: x + BIT.width / 2 - 0.5, y: y + 18, "text-anchor": "middle" }));
      });
      const place = narrow ? { x: 0, y: y - 5 } : { x: left - 8, y: y + 18, "text-anchor": "end" };
      return { name, boxes, label: svgElement("text", { class: "name", ...place }, text(name)) };
    });
    const bitsHigh = 3 * line;
    const plot = narrow ? { left: 60, top: bitsHigh + 24, width: bitsWide - 60 } : { left: left + bitsWide + 84, top: 8, width: ERROR_PLOT.width };
    this.plot = { ...ERROR_PLOT, ...plot };
    const { top, height, width } = this.plot;
    this.curve = svgElement("path", { class: "curve" });
    const drawing = svgElement("svg", { viewBox: `0 0 ${plot.left + width} ${top + height + 20}`, role: "img", "aria-label": text("title") });
    const named = (label, x, y) => svgElement("text", { class: "name", x, y, "text-anchor": "end" }, label);
    drawing.append(
      ...this.rows.flatMap(({ boxes, label }) => [label, ...boxes]),
      svgElement("line", { class: "base", x1: plot.left, x2: plot.left + width, y1: top + height, y2: top + height }),
      named("0", plot.left - 8, top + height), named(`${threeDigits(100 * facts.longest)}\u00a0%`, plot.left - 8, top + 10), named(text("keys", { keys: facts.keys }), plot.left + width, top + height + 16),
      this.curve,
    );
    root.append(element("figure", { class: "bits" }, drawing));
  }

  draw(position) {
    const { facts } = this;
    const now = position - 1;
    const top = now < 0 ? 0 : Math.floor(Math.log2(Math.max(facts.register[now], facts.total[now], 1e-9)));
    const inRegister = now < 0 ? 0 : Math.floor(Math.log2(facts.register[now]));
    for (const { name, boxes } of this.rows) {
      const value = now < 0 ? null : facts[name][now];
      const bits = boxes.map((_, i) => (value === null ? 0 : Math.floor(value / 2 ** (top - i)) % 2));
      const [first, last] = [bits.indexOf(1), bits.lastIndexOf(1)];
      boxes.forEach((box, i) => {
        const inside = name === "total" || i < facts.bits + top - inRegister;
        const shown = first >= 0 && i >= first && (i <= last || (inside && name !== "added"));
        box.setAttribute("class", !shown ? "none" : inside ? name : "cut");
        setText(box.lastChild, shown ? String(bits[i]) : "");
      });
    }
    this.curve.setAttribute("d", this.#path(position));
  }

  #path(position) {
    const { left, top, height, width } = this.plot;
    const { errors, longest } = this.facts;
    return errors.slice(0, position).map((error, i) => `${i ? "L" : "M"}${(left + ((i + 1) / errors.length) * width).toFixed(1)} ${(top + height * (1 - error / longest)).toFixed(1)}`).join("");
  }

  caption(_, data, position) {
    const { promote, instruction } = this.facts;
    return this.text(promote && (position * instruction) % promote === 0 ? "promoted" : "summed", { number: instruction, keys: position * instruction });
  }

  numbers(position) {
    const { errors, instruction } = this.facts;
    return {
      summed: [position * instruction, String],
      error: [position ? errors[position - 1] : 0, (error) => `${(100 * error).toPrecision(2)}\u00a0%`],
    };
  }
};
