// Which unit of which warpgroup is busy when: the schedule of FlashAttention-3.

const LANE = 22;
const NARROWEST_UNIT = 36; // pixels
const UNIT_CLASSES = { "tensor core": "tensor", softmax: "softmax", TMA: "copy" };

class TimelineView {
  constructor(root) {
    this.root = root.querySelector(".timeline");
    this.frame = this.root.querySelector(".scroll");
    this.names = this.root.querySelector(".names");
  }

  show(run) {
    const { spans } = run.trace;
    this.root.hidden = spans.length === 0;
    if (this.root.hidden) return;
    this.length = Math.max(...spans.map((span) => span.end));
    const lanes = [...new Set(spans.map(lane))];
    const scale = Math.max(NARROWEST_UNIT, 560 / this.length);
    this.scale = scale;
    const width = this.length * scale + 8;
    const drawing = svgElement("svg", { width, height: lanes.length * LANE + 4, role: "img", "aria-label": this.root.querySelector("h3").textContent });
    this.names.replaceChildren(...lanes.map((name) => element("span", { style: `height:${LANE}px` }, name)));
    for (const span of spans) {
      const y = lanes.indexOf(lane(span)) * LANE + 2;
      const group = svgElement("g", { class: UNIT_CLASSES[span.unit] ?? "softmax" });
      const bar = { x: span.start * scale, width: Math.max((span.end - span.start) * scale - 1, 1) };
      group.append(svgElement("rect", { ...bar, y, height: LANE - 4, rx: 3 }));
      group.append(svgElement("text", { x: bar.x + bar.width / 2, y: y + 13, "text-anchor": "middle" }, span.label));
      group.append(svgElement("title", {}, `${lane(span)}: ${span.label} (${span.start}–${span.end})`));
      drawing.append(group);
    }
    this.cursor = svgElement("line", { y1: 0, y2: lanes.length * LANE, class: "cursor" });
    drawing.append(this.cursor);
    this.frame.replaceChildren(drawing);
    this.programs = run.kernels.flatMap((kernel) => kernel.programs);
  }

  /** The timeline is that of one thread block: how far the present one has come. */
  #shareOfProgram(position) {
    const program = this.programs.findLast(({ first }) => first < position);
    return program ? Math.min((position - program.first) / (program.end - program.first), 1) : 0;
  }

  draw(position) {
    if (this.root.hidden) return;
    const x = this.#shareOfProgram(position) * this.length * this.scale;
    this.cursor.setAttribute("transform", `translate(${x} 0)`);
    const visible = this.frame.clientWidth;
    if (x < this.frame.scrollLeft || x > this.frame.scrollLeft + visible) this.frame.scrollLeft = x - visible / 3;
  }
}

function lane(span) {
  return `${span.worker} · ${span.unit}`;
}
