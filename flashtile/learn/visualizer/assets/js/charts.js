// Two pictures for all runs together: bytes moved so far, and the roofline with a point for each run.

const CHART = { width: 460, height: 240, left: 82, right: 18, top: 12, bottom: 34 };
const POINTS_A_CURVE = 400;

class TrafficChart {
  constructor(root, language) {
    this.svg = root.querySelector("svg");
    this.key = root.querySelector(".key");
    this.language = language;
  }

  /** `lines`: [{run: "a", trace}]; the last may be standard attention for comparison. */
  show(lines) {
    this.lines = lines;
    const most = Math.max(...lines.map(({ trace }) => trace.moved[trace.length]), 1);
    this.y = (bytes) => CHART.height - CHART.bottom - (bytes / most) * (CHART.height - CHART.top - CHART.bottom);
    this.x = (share) => CHART.left + share * (CHART.width - CHART.left - CHART.right);
    const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => axisMark(CHART.left, this.y(share * most), formatBytes(share * most)));
    const curves = lines.map(({ run, trace }) => svgElement("path", { class: `curve ${run}`, d: this.#curve(trace) }));
    this.dots = lines.map(({ run }) => svgElement("circle", { class: `dot ${run}`, r: 5 }));
    const label = svgElement("text", { x: CHART.width - CHART.right, y: CHART.height - 8, "text-anchor": "end" }, this.language.text("share_of_events"));
    this.svg.setAttribute("viewBox", `0 0 ${CHART.width} ${CHART.height}`);
    this.svg.replaceChildren(...marks, ...curves, ...this.dots, label);
    const named = new Set(lines.map(({ run }) => run));
    for (const key of this.key.children) key.hidden = !named.has(key.dataset.run);
  }

  #curve(trace) {
    const points = Math.min(trace.length, POINTS_A_CURVE);
    let path = "";
    for (let p = 0; p <= points; p++) {
      const position = Math.round((p / points) * trace.length);
      path += `${p ? "L" : "M"}${this.x(position / Math.max(trace.length, 1)).toFixed(1)} ${this.y(trace.moved[position]).toFixed(1)}`;
    }
    return path;
  }

  draw(positions) {
    this.lines.forEach(({ run, trace }, i) => {
      const position = positions[run];
      moveTo(this.dots[i], this.x(position / Math.max(trace.length, 1)), this.y(trace.moved[position]));
    });
  }
}

class RooflineChart {
  constructor(root, language) {
    this.svg = root.querySelector("svg");
    this.language = language;
    this.range = { x: [-1, 4], y: [10, 15.5] }; // powers of ten: FLOP/byte, FLOP/s
  }

  show(card, runs) {
    this.card = card;
    this.svg.setAttribute("viewBox", `0 0 ${CHART.width} ${CHART.height}`);
    const marks = [];
    for (let power = this.range.x[0]; power <= this.range.x[1]; power++) {
      marks.push(svgElement("text", { x: this.#x(10 ** power), y: CHART.height - 18, "text-anchor": "middle" }, power < 0 ? "0.1" : String(10 ** power)));
    }
    for (let power = this.range.y[0]; power <= this.range.y[1]; power++) {
      marks.push(axisMark(CHART.left, this.#y(10 ** power), `${power < 12 ? 10 ** (power - 9) : 10 ** (power - 12)} ${power < 12 ? "G" : "T"}FLOP/s`));
    }
    const ridge = card.flops / card.bandwidth;
    const corner = `${this.#x(ridge)} ${this.#y(card.flops)}`;
    const start = 10 ** this.range.x[0];
    const roof = `M${this.#x(start)} ${this.#y(start * card.bandwidth)}L${corner}H${CHART.width - CHART.right}`;
    const drop = `M${corner}V${CHART.height - CHART.bottom}`;
    const label = svgElement("text", { x: CHART.width - CHART.right, y: CHART.height - 4, "text-anchor": "end" }, this.language.text("flops_a_byte"));
    this.dots = runs.map(({ run }) => svgElement("g", { class: `dot ${run}` }, svgElement("path", { class: "stem", d: `M0 0V${CHART.height}` }), svgElement("circle", { r: 6 })));
    const plot = svgElement("svg", { width: CHART.width, height: CHART.height - CHART.bottom }, ...this.dots); // cuts the stems off
    this.svg.replaceChildren(...marks, svgElement("path", { class: "roof", d: roof }), svgElement("path", { class: "ridge", d: drop }), plot, label);
  }

  #x(intensity) {
    const [low, high] = this.range.x;
    const share = (Math.log10(intensity) - low) / (high - low);
    return CHART.left + Math.min(Math.max(share, 0), 1) * (CHART.width - CHART.left - CHART.right);
  }

  #y(rate) {
    const [low, high] = this.range.y;
    const share = (Math.log10(rate) - low) / (high - low);
    return CHART.height - CHART.bottom - Math.min(Math.max(share, 0), 1) * (CHART.height - CHART.top - CHART.bottom);
  }

  /** `costs`: [{intensity}] in the order of the runs; null before anything has moved or been computed. */
  draw(costs) {
    costs.forEach(({ intensity }, i) => {
      this.dots[i].toggleAttribute("hidden", !intensity);
      if (!intensity) return;
      const [x, y] = [this.#x(intensity), this.#y(Math.min(intensity * this.card.bandwidth, this.card.flops))];
      moveTo(this.dots[i], x, y);
    });
  }
}

function axisMark(x, y, text) {
  return svgElement("g", { class: "axis" },
    svgElement("line", { x1: x, x2: CHART.width - CHART.right, y1: y, y2: y }),
    svgElement("text", { x: x - 6, y: y + 4, "text-anchor": "end" }, text));
}

/** What the first `position` events cost on a card, at least. */
function costAt(trace, position, card) {
  const flops = trace.matmul[position] + trace.other[position];
  const bytes = trace.moved[position];
  const memory = bytes / card.bandwidth;
  const compute = trace.matmul[position] / card.flops;
  return { flops, bytes, memory, compute, intensity: bytes > 0 && flops > 0 ? trace.matmul[position] / bytes : 0 };
}
