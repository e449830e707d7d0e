// Four warps over time: a bar for each thing that one does, as long as it takes.

const WARP_LANE = 26;
const WARP_WIDTH = 1000;
const WARP_UNITS = { "tensor core": "tensor", softmax: "softmax", "shared memory": "copy", barrier: "wait" };

STORY_VIEWS.warps = class {
  static counters = ["shared_read", "shared_written", "barriers", "matmul_flops", "other_flops"];

  constructor({ root, trace, facts, text }) {
    this.trace = trace;
    this.scale = WARP_WIDTH / facts.cycles;
    this.ends = new Float64Array(trace.length + 1); // when the first events are done
    for (const { block, end } of trace.spans) this.ends[block + 1] = Math.max(this.ends[block + 1], end);
    for (let i = 1; i <= trace.length; i++) this.ends[i] = Math.max(this.ends[i], this.ends[i - 1]);
    this.bars = trace.spans.map((span) => ({ ...span, shown: this.#bar(span) }));
    const height = facts.num_warps * WARP_LANE;
    this.cursor = svgElement("line", { y1: 0, y2: height, class: "cursor" });
    const drawing = svgElement("svg", { viewBox: `0 0 ${WARP_WIDTH} ${height}`, preserveAspectRatio: "none", role: "img" });
    drawing.append(...this.bars.map(({ shown }) => shown), this.cursor);
    const names = Array.from({ length: facts.num_warps }, (_, warp) => element("span", { style: `height:${100 / facts.num_warps}%` }, text("warp", { warp })));
    const key = Object.entries(WARP_UNITS).map(([unit, kind]) => element("span", {}, element("i", { class: kind }), ` ${text(`unit_${kind}`)}`));
    root.append(element("div", { class: "lanes-of-warps" }, element("div", { class: "names" }, ...names), drawing), element("p", { class: "key" }, ...key));
  }

  #bar({ worker, unit, label, start, end }) {
    const { scale } = this;
    const place = { x: start * scale, y: Number(worker.split(" ")[1]) * WARP_LANE + 2, width: Math.max((end - start) * scale, 0.6), height: WARP_LANE - 4 };
    const bar = svgElement("rect", { class: WARP_UNITS[unit], ...place });
    bar.append(svgElement("title", {}, `${worker} · ${unit} ${label}: ${Math.round(start)}–${Math.round(end)}`));
    return bar;
  }

  draw(position) {
    for (const { block, shown } of this.bars) shown.classList.toggle("past", block < position);
    const x = this.ends[position] * this.scale;
    this.cursor.setAttribute("transform", `translate(${x} 0)`);
  }

  numbers(position) {
    return { cycles: [Math.round(this.ends[position]), String] };
  }
};
