// What the splits of a decoding step hand to the merge: their lse, or with a unified maximum their sums.

class MergeView {
  constructor(root, language) {
    this.root = root.querySelector(".merge");
    this.head = this.root.querySelector("thead .name");
    this.body = this.root.querySelector("tbody");
    this.language = language;
  }

  show(trace) {
    this.trace = trace;
    this.parts = trace.series.filter(({ name }) => name === "lse_s" || name === "l_s").sort((a, b) => a.row - b.row);
    this.root.hidden = this.parts.length === 0;
    if (this.root.hidden) return;
    this.head.textContent = this.parts[0].name;
    this.lines = this.parts.map(({ row }) => {
      const number = element("td", { "data-split": row });
      const bar = element("i");
      return { number, bar, line: element("tr", {}, element("th", { scope: "row" }, String(row)), number, element("td", {}, bar)) };
    });
    this.body.replaceChildren(...this.lines.map(({ line }) => line));
  }

  draw(position) {
    if (this.root.hidden) return;
    const values = this.parts.map((series) => this.trace.valueAt(series, position));
    const weights = values.map((value) => (value === undefined ? 0 : this.parts[0].name === "lse_s" ? Math.exp(value) : value));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    this.lines.forEach(({ number, bar }, i) => {
      number.dataset.value = values[i] ?? "";
      setText(number, formatStatistic(values[i]));
      setStyle(bar, "transform", `scaleX(${sum > 0 ? weights[i] / sum : 0})`);
    });
  }
}
