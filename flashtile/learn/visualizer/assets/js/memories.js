// SRAM as a bar of tiles, HBM as a table of arrays with what moved to and from each.

const NARROWEST = 0.03; // of an array, that a move shows

class SramView {
  constructor(root, language) {
    this.language = language;
    this.bar = root.querySelector(".sram .bar");
    this.legend = root.querySelector(".sram .legend");
    this.tiles = new Map();
  }

  show(sramBytes) {
    this.capacity = sramBytes;
    this.tiles.clear();
    this.bar.replaceChildren();
    this.legend.replaceChildren();
  }

  draw(tiles) {
    for (const [name, shown] of this.tiles) shown.part.hidden = shown.label.hidden = !tiles.has(name);
    for (const [name, tile] of tiles) {
      const { part, label } = this.tiles.get(name) ?? this.#add(name);
      setStyle(part, "width", `${(100 * tile.bytes) / this.capacity}%`);
      part.dataset.bytes = tile.bytes;
      const place = [formatRange(tile.row, tile.rows), formatRange(tile.col, tile.cols)].filter(Boolean).join(", ");
      setText(label.lastChild, ` ${name}${place && `[${place}]`} ${formatBytes(tile.bytes)}`);
    }
  }

  #add(name) {
    const colour = `var(${colourName(name)})`;
    const shown = {
      part: element("span", { class: "tile", "data-name": name, style: `background:${colour}` }, name),
      label: element("li", {}, element("i", { style: `background:${colour}` }), ""),
    };
    shown.label.append("");
    this.bar.append(shown.part);
    this.legend.append(shown.label);
    this.tiles.set(name, shown);
    return shown;
  }
}

class HbmView {
  constructor(root) {
    this.body = root.querySelector(".hbm tbody");
    this.rows = new Map();
  }

  show(trace) {
    this.trace = trace;
    this.rows.clear();
    this.body.replaceChildren();
  }

  draw(position) {
    const event = position > 0 ? this.trace.event(position - 1) : null;
    const present = new Map(this.trace.arraysAt(position).map((array) => [array.name, array]));
    for (const [name, shown] of this.rows) shown.row.hidden = !present.has(name);
    for (const [name, array] of present) {
      const shown = this.rows.get(name) ?? this.#add(name);
      const { read, written } = this.trace.trafficAt(name, position);
      setCounter(shown.size, array.bytes, formatBytes);
      setCounter(shown.read, read, formatBytes);
      setCounter(shown.written, written, formatBytes);
      const moves = event !== null && event.array === name && (event.kind === "load" || event.kind === "store");
      shown.place.hidden = !moves;
      if (moves) {
        shown.place.className = event.kind;
        const share = Math.max(event.rows / array.rows, NARROWEST);
        const start = Math.min(event.row / array.rows, 1 - share);
        setStyle(shown.place, "transform", `translateX(${100 * start}%) scaleX(${share})`);
      }
    }
  }

  #add(name) {
    const cell = (counter) => element("td", { "data-counter": `${name}.${counter}` });
    const shown = { size: cell("size"), read: cell("read"), written: cell("written"), place: element("i") };
    const strip = element("span", { class: "strip", style: `--colour:var(${colourName(name)})` }, shown.place);
    shown.row = element("tr", { "data-array": name }, element("th", { scope: "row" }, name, strip), shown.size, shown.read, shown.written);
    this.body.append(shown.row);
    this.rows.set(name, shown);
    return shown;
  }
}
