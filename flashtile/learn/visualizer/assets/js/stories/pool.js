// A memory for keys and values as cells of a page each: who holds them, and whether a token is in them.

const POOL_COLUMNS = 40;
const HUE_STEP = 47; // degrees between two sequences that follow each other

STORY_VIEWS.pool = class {
  static counters = [];

  /** All memories see the same steps. */
  static pace(trace) {
    const steps = new Float64Array(trace.length + 1);
    trace.data.forEach(([number, data]) => (steps[number + 1] = data.step + 1));
    return steps;
  }

  constructor({ root, trace, facts, name, text }) {
    Object.assign(this, { trace, facts, text });
    this.cells = Math.floor(facts.slots / facts.page_size);
    this.grid = new CellGrid(text(`case_${name}`), Math.ceil(this.cells / POOL_COLUMNS), POOL_COLUMNS, 8);
    const key = ["used", "reserved", "never", "free"].map((state) => element("span", {}, element("i", { class: state }), ` ${text(state)}`));
    this.grid.root.querySelector("figcaption").remove(); // the case has its name
    root.append(this.grid.root, element("p", { class: "key" }, ...key));
  }

  draw(position) {
    const states = new Array(this.cells).fill("free");
    for (const sequence of this.trace.dataAt(position)?.sequences ?? []) this.#place(states, sequence);
    this.grid.paint((row, col) => states[row * POOL_COLUMNS + col] ?? "none");
  }

  #place(states, [number, tokens, final, ...places]) {
    const { page_size: size, paged } = this.facts;
    const hue = 150 + ((number * HUE_STEP) % 180); // from green to magenta: red is for what is never used
    const cells = paged ? places : Array.from({ length: Math.ceil((places[0] + places[1]) / size) - Math.floor(places[0] / size) }, (_, i) => Math.floor(places[0] / size) + i);
    cells.forEach((cell, i) => (states[cell] = i * size < tokens ? ["used", hue] : i * size < final ? ["reserved", hue] : "never"));
  }

  caption(event, data) {
    return this.text("caption", { step: data.step, sequences: data.sequences.length, waiting: data.waiting, used: data.used, held: data.held });
  }

  numbers(position) {
    const data = this.trace.dataAt(position);
    const share = (part) => `${threeDigits(100 * part)} %`;
    const { sequences, waste, unusable, steps } = this.facts;
    return {
      now: [data ? data.sequences.length : 0, String],
      waste_now: [data ? 1 - data.used / Math.max(data.held, 1) : 0, share],
      sequences: [sequences, threeDigits],
      waste: [waste, share],
      unusable: [unusable, share],
      steps: [steps, String],
    };
  }
};
