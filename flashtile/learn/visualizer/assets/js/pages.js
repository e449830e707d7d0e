// PagedAttention's memory: each sequence's logical blocks, the physical blocks behind them, who shares which.

class PagesView {
  constructor(root, language) {
    this.root = root.querySelector(".pages");
    this.note = this.root.querySelector(".note");
    this.sequences = this.root.querySelector(".sequences");
    this.pool = this.root.querySelector(".pool");
    this.language = language;
  }

  show(run) {
    this.trace = run.trace;
    this.pageSize = run.recording.settings.page_size;
    this.root.hidden = !run.trace.data.some(([, data]) => data.tables);
    this.data = undefined;
  }

  draw(position) {
    if (this.root.hidden) return;
    const data = this.trace.dataAt(position);
    const tile = position > 0 ? this.trace.event(position - 1) : null;
    if (data !== this.data || !this.drawn) this.#drawTables(data);
    this.#drawTouched(tile);
  }

  #drawTables(data) {
    this.data = data;
    this.drawn = true;
    const { op, sequence, tables = {}, lengths = {}, ref_counts: counts = [], block, source } = data ?? {};
    setText(this.note, op ? this.language.text(`page_${op}`, data) : "");
    this.sequences.replaceChildren(...Object.entries(tables).map(([name, table]) => this.#sequence(name, table, lengths[name], counts)));
    this.blocks = counts.map((count, number) => this.#block(number, count, tables, op === "copy_on_write" ? { block, source } : { block }));
    this.pool.replaceChildren(...this.blocks);
  }

  #sequence(name, table, length, counts) {
    const blocks = table.map((physical, logical) => {
      const tokens = Math.max(0, Math.min(this.pageSize, length - logical * this.pageSize));
      return element("li", { class: counts[physical] > 1 ? "shared" : "own", "data-physical": physical, style: `--filled:${tokens / this.pageSize}` },
        element("small", {}, String(logical)), `→ ${physical}`);
    });
    const title = this.language.text("sequence", { name, length });
    return element("div", { "data-sequence": name }, element("h3", {}, title), element("ol", { class: "blocks" }, ...blocks));
  }

  #block(number, count, tables, marked) {
    const owners = Object.entries(tables).filter(([, table]) => table.includes(number)).map(([name]) => name);
    const kind = count === 0 ? "free" : count > 1 ? "shared" : "own";
    const mark = number === marked.block ? " target" : number === marked.source ? " source" : "";
    return element("li", { class: kind + mark, "data-block": number, "data-count": count },
      element("small", {}, String(number)), element("b", {}, count === 0 ? "" : `×${count}`), element("span", {}, owners.join(" ")));
  }

  /** The physical block whose keys or values the last event moved. */
  #drawTouched(event) {
    const moves = event && (event.kind === "load" || event.kind === "store") && /^[KV]/.test(event.name);
    const touched = moves ? Math.floor(event.row / this.pageSize) : -1;
    this.blocks?.forEach((block, number) => block.classList.toggle("touched", number === touched));
  }
}
