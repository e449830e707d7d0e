// A sum of FP8 products in a register of few bits: what each instruction adds, which of its bits are cut off, the error.

const BITS_PLOT = { cell: 22, left: 112, columns: 24, high: 26, gap: 12 };
const ERROR_PLOT = { top: 150, height: 90, width: 24 * 22 };

STORY_VIEWS.sums = class {
  static counters = [];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts, text });
    const { left, columns, cell, high, gap } = BITS_PLOT;
    const rows = ["added", "register", ...(facts.promote ? ["total"] : [])];
    this.rows = rows.map((name, row) => {
      const y = row * (high + gap) + 4;
      const boxes = Array.from({ length: columns }, (_, i) => {
        const box = svgElement("g", {}, svgElement("rect", { x: left + i * cell + 0.5, y, width: cell - 2, height: high, rx: 2 }), svgElement("text", { x: left + i * cell + cell / 2 - 0.5, y: y + 18, "text-anchor": "middle" }));
        return box;
      });
      return { name, boxes, label: svgElement("text", { class: "name", x: left - 8, y: y + 18, "text-anchor": "end" }, text(name)) };
    });
    const { top, height, width } = ERROR_PLOT;
    this.curve = svgElement("path", { class: "curve" });
    const drawing = svgElement("svg", { viewBox: `0 0 ${left + width} ${top + height + 20}`, role: "img", "aria-label": text("title") });
    drawing.append(
      ...this.rows.flatMap(({ boxes, label }) => [label, ...boxes]),
      svgElement("line", { class: "base", x1: left, x2: left + width, y1: top + height, y2: top + height }),
      svgElement("text", { class: "name", x: left - 8, y: top + height, "text-anchor": "end" }, "0"),
      svgElement("text", { class: "name", x: left - 8, y: top + 10, "text-anchor": "end" }, `${threeDigits(100 * facts.longest)}\u00a0%`),
      svgElement("text", { class: "name", x: left + width, y: top + height + 16, "text-anchor": "end" }, text("keys", { keys: facts.keys })),
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
      boxes.forEach((box, i) => {
        const bit = value === null ? 0 : Math.floor(value / 2 ** (top - i)) % 2;
        const kept = name === "total" || inRegister - (top - i) < facts.bits;
        const used = value !== null && top - i <= Math.log2(value || 1e-9);
        box.setAttribute("class", value === null || (!used && !bit) || (name === "register" && !kept) ? "none" : kept ? name : bit ? "cut" : "none");
        setText(box.lastChild, value === null || (name === "register" && !kept) ? "" : String(bit));
      });
    }
    this.curve.setAttribute("d", this.#path(position));
  }

  #path(position) {
    const { left } = BITS_PLOT;
    const { top, height, width } = ERROR_PLOT;
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
