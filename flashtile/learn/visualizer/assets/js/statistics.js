// The running maximum and sum of a watched row, as numbers and as they changed.

const STATISTICS = ["m", "l", "lse"];
const WIDTH = 300;
const HEIGHT = 70;

class StatisticsView {
  constructor(root, choose) {
    this.root = root.querySelector(".statistics");
    this.choice = this.root.querySelector("select");
    this.body = this.root.querySelector("tbody");
    this.output = this.root.querySelector(".output");
    this.choice.addEventListener("change", () => choose(Number(this.choice.value)));
  }

  show(trace) {
    this.trace = trace;
    this.watched = trace.rowsOf(STATISTICS);
    this.root.hidden = this.watched.length === 0;
    this.choice.replaceChildren(...this.watched.map((row) => element("option", { value: row }, String(row))));
    this.row = undefined;
  }

  /** The watched row nearest to the wanted one. */
  nearestRow(wanted) {
    return this.watched.length ? nearest(wanted ?? this.watched[0], this.watched) : undefined;
  }

  draw(position, row) {
    if (this.root.hidden) return;
    if (this.row !== row) this.#chooseRow(row);
    setText(this.output, this.#outputAt(position, row));
    for (const { series, number, dot, y } of this.shown) {
      const value = this.trace.valueAt(series, position);
      number.dataset.value = value === undefined ? "" : String(value);
      setText(number, formatStatistic(value));
      const height = y(value);
      dot.toggleAttribute("hidden", !Number.isFinite(height));
      if (!Number.isFinite(height)) continue;
      setStyle(dot, "transform", `translate(${(100 * position) / this.trace.length}%, ${(100 * height) / HEIGHT}%)`);
    }
  }

  /** The row of O in SRAM where a run has its numbers; else by what the last tile rescaled it. */
  #outputAt(position, row) {
    const { trace } = this;
    for (let i = position - 1; i >= 0; i--) {
      const { array, kind, op, rows } = trace.forms[trace.form[i]];
      if (array !== "O" || (kind !== "compute" && kind !== "load") || trace.row[i] > row || row >= trace.row[i] + rows) continue;
      const numbers = trace.numbers?.[i]?.[row - trace.row[i]];
      if (numbers) return `O[${row}] = ${numbers.map(formatStatistic).join(", ")}`;
      const known = op ? numbersOfRow(trace, i + 1, row) : null;
      return known ? `O[${row}] = O · ${known.factor} + P V` : "";
    }
    return "";
  }

  #chooseRow(row) {
    this.row = row;
    this.choice.value = row;
    this.shown = STATISTICS.flatMap((name) => {
      const series = this.trace.series.find((s) => arrayOf(s.name) === name && s.row === row);
      return series ? [this.#plot(series)] : [];
    });
    this.body.replaceChildren(...this.shown.map(({ line }) => line));
  }

  #plot(series) {
    const values = series.value.map((value) => (value < -1e38 ? NaN : value));
    const finite = values.filter(Number.isFinite);
    const low = Math.min(...finite);
    const high = Math.max(...finite);
    const y = (value) => {
      if (value === undefined || !Number.isFinite(value) || value < -1e38) return NaN;
      return high === low ? HEIGHT / 2 : HEIGHT - 6 - ((value - low) / (high - low)) * (HEIGHT - 12);
    };
    const x = (event) => ((event + 1) / this.trace.length) * WIDTH;
    let path = "";
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      const end = i + 1 < values.length ? x(series.at[i + 1]) : WIDTH;
      path += `${path ? "L" : "M"}${x(series.at[i]).toFixed(1)} ${y(value).toFixed(1)}H${end.toFixed(1)}`;
    });
    const dot = element("i");
    const number = element("td", { "data-statistic": arrayOf(series.name) });
    const plot = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, svgElement("path", { d: path }));
    return { series, number, dot, y, line: element("tr", {}, element("th", { scope: "row" }, arrayOf(series.name)), number, element("td", { class: "plot" }, element("div", {}, plot, dot))) };
  }
}
