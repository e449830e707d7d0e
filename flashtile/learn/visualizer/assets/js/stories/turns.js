// FlashAttention-3's thread block over time: who loads, who multiplies, who computes a softmax, and who waits.

const TURN_UNIT = 36; // width of a product's time
const [HIGH_LANE, LOW_LANE] = [80, 38]; // of a timeline alone, and of one among others
const [HIGH_LANE_PHONE, LOW_LANE_PHONE] = [56, 34];
const TURN_LANES = [["producer", "TMA"], ...[0, 1].flatMap((w) => ["tensor core", "softmax"].map((unit) => [`warpgroup ${w}`, unit])), ["all", "tensor core"]];
const TURN_CLASSES = { TMA: "copy", "tensor core": "tensor", softmax: "softmax" };

STORY_VIEWS.turns = class {
  static counters = [];

  /** All timelines have the same clock. */
  static pace(trace) {
    return trace.sumOf(() => 1);
  }

  constructor({ root, trace, facts, text, alone }) {
    const [high, low] = innerWidth > 900 ? [HIGH_LANE, LOW_LANE] : [HIGH_LANE_PHONE, LOW_LANE_PHONE];
    Object.assign(this, { trace, facts, text, lane: alone ? Math.min(high, Math.max(innerHeight - 400, 300) / TURN_LANES.length) : low });
    const [width, height] = [facts.longest * TURN_UNIT, TURN_LANES.length * this.lane];
    const laneOf = (worker, unit) => TURN_LANES.findIndex((lane) => lane[0] === worker && lane[1] === unit);
    this.waits = facts.waits.map(([worker, unit, barrier, start, end, [by, label, block]]) => ({ worker, unit, barrier, start, end, by, label, block }));
    this.bars = [
      ...this.waits.map((wait) => ({ ...wait, shown: this.#bar(laneOf(wait.worker, wait.unit), wait, `wait ${wait.barrier}`, text(`short_${wait.barrier}`)) })),
      ...trace.spans.map((span) => ({ ...span, shown: this.#bar(laneOf(span.worker, span.unit), span, TURN_CLASSES[span.unit], `${span.label === "softmax" ? "exp" : span.label} ${span.block}`) })),
      ...this.#tensorCores().map((part) => ({ ...part, shown: this.#bar(TURN_LANES.length - 1, part, part.kind, part.kind === "idle" ? text("idle") : "") })),
    ];
    const rules = TURN_LANES.map((_, i) => svgElement("line", { class: "rule", x1: 0, x2: width, y1: (i + 1) * this.lane, y2: (i + 1) * this.lane }));
    this.cursor = svgElement("line", { y1: 0, y2: height, class: "cursor" });
    const drawing = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, style: `min-width:${0.8 * width}px`, role: "img", "aria-label": text("title") });
    drawing.append(...rules, ...this.bars.map(({ shown }) => shown), this.cursor);
    const names = TURN_LANES.map(([worker, unit]) => element("span", {}, element("b", {}, this.#nameOf(worker)), worker === "all" ? "" : ` ${text(`unit_${TURN_CLASSES[unit]}`)}`));
    this.frame = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": text("title") }, drawing);
    const key = ["copy", "tensor", "softmax", "wait", "idle"].map((kind) => element("span", {}, element("i", { class: kind }), ` ${text(`key_${kind}`)}`));
    root.append(element("div", { class: "turns" }, element("div", { class: "names" }, ...names), this.frame), element("p", { class: "key" }, ...key));
  }

  /** When the tensor cores work, for either warpgroup, and when nothing gives them a product. */
  #tensorCores() {
    const works = this.trace.spans.filter(({ unit }) => unit === "tensor core").sort((a, b) => a.start - b.start);
    let before = 0;
    return works.flatMap(({ start, end }) => {
      const idle = start > before ? [{ kind: "idle", start: before, end: start }] : [];
      before = end;
      return [...idle, { kind: "tensor", start, end }];
    });
  }

  #nameOf(worker) {
    if (worker === "all") return this.text("tensor_cores");
    return worker === "producer" ? this.text("producer") : this.text("warpgroup", { w: worker.split(" ")[1] });
  }

  #bar(lane, { start, end }, kind, label) {
    const [x, width] = [start * TURN_UNIT, (end - start) * TURN_UNIT];
    const [y, high] = kind.startsWith("wait") ? [lane * this.lane + 11, this.lane - 22] : [lane * this.lane + 4, this.lane - 8];
    const bar = svgElement("g", { class: kind }, svgElement("rect", { x: x + 0.5, y, width: width - 1, height: high, rx: 3 }));
    const long = [...label].reduce((sum, letter) => sum + (letter > "\u2e80" ? 11.5 : 6.4), 0);
    if (long < width) bar.append(svgElement("text", { x: x + width / 2, y: lane * this.lane + this.lane / 2 + 4, "text-anchor": "middle" }, label));
    return bar;
  }

  draw(position) {
    const now = position / this.facts.ticks;
    for (const { start, end, shown } of this.bars) {
      shown.classList.toggle("begun", start < now);
      shown.classList.toggle("at-work", start < now && now <= end);
    }
    const x = now * TURN_UNIT;
    this.cursor.setAttribute("transform", `translate(${x} 0)`);
    const shown = (x / (this.facts.longest * TURN_UNIT)) * this.frame.scrollWidth;
    if (shown < this.frame.scrollLeft || shown > this.frame.scrollLeft + this.frame.clientWidth) this.frame.scrollLeft = shown - this.frame.clientWidth / 2;
  }

  /** What every worker does in the last tick. */
  caption(_, data, position) {
    const now = position / this.facts.ticks;
    const during = ({ start, end }) => start < now && now <= end;
    const said = (one, key) => this.text(key, { worker: this.#nameOf(one.worker), label: one.label, block: one.block });
    const works = this.trace.spans.filter(during).map((span) => said(span, `does_${TURN_CLASSES[span.unit]}`));
    const waits = this.waits.filter(during).map((wait) => said(wait, `waits_${wait.barrier}`));
    return [...works, ...waits].join(" ");
  }

  numbers(position) {
    const now = position / this.facts.ticks;
    const busy = this.trace.spans.filter(({ unit }) => unit === "tensor core").reduce((sum, { start, end }) => sum + Math.max(Math.min(end, now) - start, 0), 0);
    return { time: [now, (time) => time.toFixed(1)], busy: [now ? busy / now : 0, (share) => `${Math.round(100 * share)} %`] };
  }
};
