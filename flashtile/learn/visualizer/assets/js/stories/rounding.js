// The positive values of e4m3 on a logarithmic axis, and where numbers land on it.

const E4M3_PLOT = { wide: 760, narrow: 380, height: 190, axis: 150, low: -10.5, high: 9 }; // from 2^low to 2^high
const E4M3_LABELS = [2 ** -9, 2 ** -6, 2 ** -3, 1, 8, 64, 448];

STORY_VIEWS.rounding = class {
  static counters = [];

  constructor({ root, trace, facts, text }) {
    Object.assign(this, { trace, facts, text });
    const { wide, narrow, height, axis, low, high } = E4M3_PLOT;
    const width = innerWidth > 900 ? wide : narrow; // a phone has readable names
    this.x = (value) => (value > 0 ? ((Math.max(Math.log2(value), low) - low) / (high - low)) * (width - 24) + 12 : 12);
    const tick = (value) => svgElement("line", { class: "tick", x1: this.x(value), x2: this.x(value), y1: axis - (Number.isInteger(Math.log2(value)) ? 9 : 5), y2: axis });
    const labels = [[0, "0"], ...E4M3_LABELS.map((value) => [value, value < 1 ? value.toFixed(3) : String(value)])];
    const names = labels.map(([value, name]) => svgElement("text", { x: this.x(value), y: axis + 16, "text-anchor": "middle" }, name));
    this.dots = facts.x.map((value, i) => ({
      from: this.x(value / facts.scale), to: this.x(facts.stored[i] / facts.scale),
      error: facts.stored[i] === 0 ? "lost" : facts.errors[i] > 1 / 16 ? "coarse" : "fine",
      shown: svgElement("circle", { r: 6, cx: 0, cy: 0 }),
    }));
    const drawing = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text("title") });
    drawing.append(svgElement("line", { class: "base", x1: 0, x2: width, y1: axis, y2: axis }), tick(0), ...facts.values.map(tick), ...names, ...this.dots.map(({ shown }) => shown));
    root.append(element("figure", { class: "e4m3" }, drawing));
    const strip = (name, values) => {
      const cells = values.map((value) => element("span", {}, value));
      root.append(element("p", { class: "strip-of-cells in-threes" }, element("b", {}, text(name)), ...cells));
      return cells;
    };
    strip("given", facts.x.map(String));
    this.cells = strip("stored", facts.x.map(() => "–"));
    this.done = new FirstTouch(trace, "X", ["compute"], 1, facts.x.length);
  }

  draw(position) {
    this.dots.forEach(({ from, to, error, shown }, i) => {
      const done = this.done.before(position, 0, i);
      shown.setAttribute("class", done ? error : "untouched");
      setStyle(shown, "transform", `translate(${done ? to : from}px, ${done ? E4M3_PLOT.axis - 16 : 36}px)`);
      setText(this.cells[i], done ? String(this.facts.stored[i]) : "–");
      this.cells[i].classList.toggle("wrong", done && error === "lost");
    });
  }

  caption(event) {
    const i = event.col;
    return event.kind === "compute" || event.kind === "free" ? this.text("caption", { x: this.facts.x[i], stored: this.facts.stored[i] }) : null;
  }

  numbers(position) {
    const errors = this.facts.errors.map((error, i) => (this.done.before(position, 0, i) ? error : 0));
    return { scale: [this.facts.scale, String], percent: [100 * Math.max(...errors), (percent) => `${threeDigits(percent)} %`] };
  }
};
