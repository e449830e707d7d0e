// The score matrix as tiles: when each was computed, skipped, and written to HBM.

const NEVER = 0xffffffff;

class ScoreGrid {
  /** Null where a trace computes no scores. */
  static of(trace) {
    const computed = [];
    for (let i = 0; i < trace.length; i++) {
      const form = trace.forms[trace.form[i]];
      if (form.array === "S" && (form.kind === "compute" || form.kind === "skip")) computed.push(i);
    }
    return computed.length ? new ScoreGrid(trace, computed) : null;
  }

  constructor(trace, computed) {
    const edges = (start, size) =>
      [...new Set(computed.flatMap((i) => {
        const form = trace.forms[trace.form[i]];
        return [trace[start][i], trace[start][i] + form[size]];
      }))].sort((a, b) => a - b);
    this.rowEdges = edges("row", "rows");
    this.colEdges = edges("col", "cols");
    this.height = this.rowEdges.length - 1;
    this.width = this.colEdges.length - 1;
    const times = () => new Uint32Array(this.height * this.width).fill(NEVER);
    Object.assign(this, { computedAt: times(), skippedAt: times(), storedAt: times(), weightsStoredAt: times() });
    this.programs = new Uint32Array(this.height * this.width); // who computed each
    for (let i = 0; i < trace.length; i++) {
      const event = trace.forms[trace.form[i]];
      if (event.array === "S" && event.kind === "compute") this.#mark(this.computedAt, trace, event, i, true);
      if (event.kind === "skip") this.#mark(this.skippedAt, trace, event, i, true);
      if (event.name === "S" && event.kind === "store") this.#mark(this.storedAt, trace, event, i, false);
      if (event.name === "P" && event.kind === "store") this.#mark(this.weightsStoredAt, trace, event, i, false);
    }
  }

  /** Cells [first, end) that the range from `start` of `size` touches. */
  static span(edges, start, size) {
    const first = Math.max(countUpTo(edges, start) - 1, 0);
    let end = first;
    while (end < edges.length - 1 && edges[end] < start + size) end++;
    return [first, end];
  }

  #mark(times, trace, event, i, keepFirst) {
    const [top, bottom] = ScoreGrid.span(this.rowEdges, trace.row[i], event.rows);
    const [left, right] = ScoreGrid.span(this.colEdges, Math.max(trace.col[i], 0), event.cols);
    for (let y = top; y < bottom; y++) {
      for (let x = left; x < right; x++) {
        const cell = y * this.width + x;
        if (keepFirst && times[cell] !== NEVER) continue;
        times[cell] = i;
        if (times === this.computedAt) this.programs[cell] = trace.program[i];
      }
    }
  }

  /** What a cell shows after `position` events. */
  stateOf(cell, position) {
    if (this.weightsStoredAt[cell] < position) return "weights";
    if (this.storedAt[cell] < position) return "stored";
    if (this.computedAt[cell] < position) return "computed";
    return this.skippedAt[cell] < position ? "skipped" : "untouched";
  }
}
