// The scores of one query, and what is subtracted from them: a maximum that grows, or one number for all.

const SCORE_PLOT = { width: 360, height: 170, left: 10, low: 1.5, high: 10 };

STORY_VIEWS.unified = class {
  static counters = ["hbm_read", "other_flops"];

  constructor({ root, trace, facts, name, text }) {
    Object.assign(this, { trace, facts, text, unified: name === "unified" });
    const { scores, phi, bounds, num_splits } = facts;
    const step = (SCORE_PLOT.width - 2 * SCORE_PLOT.left) / scores.length;
    this.y = (score) => SCORE_PLOT.height * (1 - (score - SCORE_PLOT.low) / (SCORE_PLOT.high - SCORE_PLOT.low));
    const level = (score, kind) => svgElement("line", { class: kind, x1: 0, x2: SCORE_PLOT.width, y1: this.y(score), y2: this.y(score) });
    const levels = this.unified ? [level(phi, "phi"), ...bounds.map((bound) => level(phi + bound, "bound"))] : [];
    const edges = Array.from({ length: num_splits - 1 }, (_, i) => {
      const x = SCORE_PLOT.left + ((i + 1) * scores.length * step) / num_splits;
      return svgElement("line", { class: "split", x1: x, x2: x, y1: 0, y2: SCORE_PLOT.height });
    });
    this.dots = scores.map((score, i) => svgElement("circle", { cx: SCORE_PLOT.left + (i + 0.5) * step, cy: this.y(score), r: 5, "data-score": score }));
    this.maximum = level(0, "maximum");
    const drawing = svgElement("svg", { viewBox: `0 0 ${SCORE_PLOT.width} ${SCORE_PLOT.height}`, role: "img", "aria-label": text("title") });
    const named = (score, label, kind) => svgElement("text", { class: kind, x: SCORE_PLOT.width - 2, y: this.y(score) - 4, "text-anchor": "end" }, label);
    const names = this.unified ? [named(phi, `φ = ${phi}`, "phi"), ...bounds.map((bound) => named(phi + bound, `φ ${bound < 0 ? "−" : "+"} ${Math.abs(bound)}`, "bound"))] : [];
    this.named = svgElement("text", { class: "maximum", x: 2 }, "m");
    drawing.append(...levels, ...edges, ...this.dots, this.maximum, ...names, this.named);
    root.append(element("figure", { class: "scores" }, drawing));
    this.seen = new FirstTouch(trace, "S", ["compute"], 1, scores.length);
    this.corrections = trace.sumOf(({ op }) => (/^O = exp\(m - m'\) O/.test(op) ? 1 : 0));
    const again = new Set();
    this.again = trace.sumOf((form, i) => (form.kernel === "recompute" && !again.has(trace.program[i]) && again.add(trace.program[i]) ? 1 : 0));
  }

  draw(position, event) {
    const { phi, bounds, scores } = this.facts;
    const running = !this.unified || event?.kernel === "recompute";
    const tile = this.trace.tilesAt(position).get("S");
    this.dots.forEach((dot, i) => {
      const outside = this.unified && (scores[i] - phi <= bounds[0] || scores[i] - phi >= bounds[1]);
      const seen = this.seen.before(position, 0, i);
      dot.setAttribute("class", !seen ? "untouched" : tile && tile.col <= i && i < tile.col + tile.cols ? "held" : outside ? "wrong" : "seen");
    });
    const m = running ? this.trace.statistic("m", position) : undefined;
    const known = Number.isFinite(m) && m > -1e38;
    for (const part of [this.maximum, this.named]) part.toggleAttribute("hidden", !known);
    if (!known) return;
    for (const end of ["y1", "y2"]) this.maximum.setAttribute(end, this.y(m));
    this.named.setAttribute("y", this.y(m) - 4);
  }

  numbers(position) {
    return { corrections: [this.corrections[position], String], again: [this.again[position], String] };
  }
};
