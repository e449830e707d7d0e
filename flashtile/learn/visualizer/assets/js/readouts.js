// What one wants to know at a glance: how many tiles, which one now, how far, and how many scores are held at once.

class ReadoutsView {
  constructor(root, language) {
    this.root = root.querySelector(".readouts");
    this.language = language;
    this.parts = Object.fromEntries(["tiles", "block", "progress", "held", "saved", "held_bytes"].map((name) => [name, this.root.querySelector(`[data-readout=${name}]`)]));
  }

  show({ trace, grid, recording }) {
    this.trace = trace;
    this.grid = grid;
    this.root.hidden = grid === null;
    if (grid === null) return;
    this.tile = undefined;
    const { width, height } = grid;
    const { all, held } = scoresHeld(trace, grid);
    const bytes = recording.settings.element ?? 2;
    const saved = 100 * (1 - held / all);
    this.#put("tiles", width * height, `${height} × ${width} = ${width * height}`);
    this.#put("held", held, this.language.text("held_against", { all: String(all), held: String(held) }));
    this.#put("saved", saved, `${saved.toFixed(1)} %`);
    this.#put("held_bytes", held * bytes, this.language.text("held_against", { all: formatBytes(all * bytes), held: formatBytes(held * bytes) }));
  }

  draw(position) {
    if (this.grid === null) return;
    const percent = Math.floor((100 * position) / this.trace.length);
    this.#put("progress", percent, `${percent} %`);
    const [row, col] = this.#tileAt(position);
    this.#put("block", `${row},${col}`, `(${row}, ${col})`);
  }

  #put(name, value, text) {
    const part = this.parts[name];
    if (part.dataset.value === String(value) && part.textContent === text) return;
    part.dataset.value = value;
    part.textContent = text;
  }

  /** Of the last event about scores, else of the first one to come. */
  #tileAt(position) {
    const { forms, form, row, col } = this.trace;
    const scores = (i) => ["S", "P"].includes(forms[form[i]].array) && row[i] >= 0 && forms[form[i]].kind !== "empty";
    let i = position - 1;
    while (i >= 0 && !scores(i)) i--;
    if (i < 0) for (i = position; !scores(i); i++);
    return [countUpTo(this.grid.rowEdges, row[i]) - 1, countUpTo(this.grid.colEdges, Math.max(col[i], 0)) - 1];
  }
}

/** Scores of the whole matrix, and the most that are held at a time: all, where S is written to HBM. */
function scoresHeld(trace, grid) {
  const all = grid.rowEdges.at(-1) * grid.colEdges.at(-1);
  const stored = trace.arrays.some(({ name }) => name === "S" || name === "P");
  const tiles = trace.forms.filter(({ array, kind }) => array === "S" && kind === "compute").map(({ rows, cols }) => rows * cols);
  return { all, held: stored ? all : Math.max(...tiles) };
}
