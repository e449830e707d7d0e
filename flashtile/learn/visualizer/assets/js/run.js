// One run on the page: its stage, the panel that explains it, and its details in the drawer.

const COUNTERS = {
  hbm_read: ["read", formatBytes],
  hbm_written: ["written", formatBytes],
  hbm_moved: ["moved", formatBytes],
  matmul_flops: ["matmul", formatFlops],
  other_flops: ["other", formatFlops],
  sram_peak: ["sramPeak", formatBytes],
  hbm_peak: ["hbmPeak", formatBytes],
};

/** A recording with its trace and what follows from it. */
async function loadRun(catalog, recording) {
  const trace = await catalog.trace(recording);
  trace.grid ??= ScoreGrid.of(trace) ?? false;
  trace.kernels ??= kernelsOf(trace);
  const chain = trace.kernels.reduce((sum, kernel) => sum + kernel.chain, 0);
  trace.scoresHeld ??= heldScores(trace);
  return { recording, trace, grid: trace.grid || null, kernels: trace.kernels, chain };
}

/** How many scores of the matrix are held after each event, in SRAM or in HBM: as a score, as a weight, or as both. */
function heldScores(trace) {
  const held = new Float64Array(trace.length + 1);
  const tiles = new Map(); // computed, and not yet written
  const stored = { S: 0, P: 0 };
  const matrix = trace.forms.find(({ name, kind }) => name === "S" && kind === "empty");
  const most = matrix ? matrix.rows * matrix.cols : Infinity;
  let onChip = 0;
  for (let i = 0; i < trace.length; i++) {
    const { kind, name, array, rows, cols, op } = trace.forms[trace.form[i]];
    if (array === "S" || array === "P") {
      const before = tiles.get(name) ?? 0;
      if (kind === "compute" && op !== "") tiles.set(name, rows * cols);
      if (kind === "free" || kind === "store") tiles.delete(name);
      onChip += (tiles.get(name) ?? 0) - before;
      if (kind === "store") stored[array] += rows * cols;
      if (kind === "release") stored[array] = 0;
    }
    held[i + 1] = Math.min(Math.max(stored.S, stored.P) + onChip, most);
  }
  return held;
}

const CALM = 200; // milliseconds between two sentences while a run plays

class RunView {
  /** `actions`: chooseRow(row), chooseOwn(parameter, value), openArithmetic(open). */
  constructor(name, language, actions) {
    this.name = name;
    this.language = language;
    this.actions = actions;
    const made = (template) => {
      const root = document.getElementById(template).content.cloneNode(true).firstElementChild;
      root.dataset.run = name;
      root.classList.add(name);
      return root;
    };
    [this.root, this.panel, this.details] = ["run", "panel", "details"].map(made);
    const [stage, panel, details] = [this.root, this.panel, this.details].map((root) => (selector) => root.querySelector(selector));
    this.titles = [stage("h2"), panel("h2"), details("h3")];
    this.about = details(".about");
    this.now = panel(".now");
    this.step = panel("[data-counter=position]");
    this.line = panel(".line");
    this.formula = panel(".formula");
    this.bound = details("[data-counter=bound]");
    this.moved = { root: stage(".moved"), bar: stage(".moved i"), words: stage("[data-counter=beside_standard]") };
    this.held = { root: stage(".held"), bar: stage(".held i"), words: stage("[data-counter=scores_held]") };
    this.counters = Object.keys(COUNTERS).map((key) => [key, details(`[data-counter=${key}]`)]);
    this.scene = new SceneView(stage("canvas"), language, actions.chooseRow);
    this.pages = new PagesView(this.root, language);
    this.statistics = new StatisticsView(this.panel, actions.chooseRow);
    this.timeline = new TimelineView(this.panel);
    this.pseudocode = new PseudocodeView(this.panel, language);
    this.sram = new SramView(this.details);
    this.hbm = new HbmView(this.details);
    this.programs = new ProgramsView(this.details, language);
    this.merge = new MergeView(this.details, language);
    this.readouts = new ReadoutsView(this.details, language);
    this.arithmetic = new ArithmeticView(this.details, language, actions.openArithmetic);
  }

  set hidden(hidden) {
    for (const root of [this.root, this.panel, this.details]) root.hidden = hidden;
  }

  /** `compared`: all runs on the page; `most`: bytes at the end of the bar. */
  show(run, choices, baseline, sram, compared) {
    this.run = run;
    this.baseline = baseline;
    const { recording, trace } = run;
    for (const root of [this.root, this.panel, this.details]) this.language.apply(root);
    for (const title of this.titles) setText(title, this.#title(recording, compared));
    setText(this.about, this.language.text(`about_${recording.algorithm}`));
    this.#showChoices(recording, choices);
    for (const view of [this.pages, this.programs, this.timeline, this.readouts, this.pseudocode, this.arithmetic]) view.show(run);
    for (const view of [this.hbm, this.statistics, this.merge]) view.show(trace);
    this.sram.show(sram);
    this.root.classList.toggle("with-pages", !this.pages.root.hidden); // before the canvas is measured
    this.#showKey(run);
    this.scene.show(run, sram, compared);
    this.moved.root.hidden = baseline === null;
    this.held.root.hidden = run.grid === null || trace.data.length > 0;
    this.mostScores = run.grid ? run.grid.rowEdges.at(-1) * run.grid.colEdges.at(-1) : 1;
    this.said = 0;
  }

  /** The algorithm, and where both runs have the same one, what sets them apart. */
  #title({ algorithm, settings }, compared) {
    const name = this.language.text(`algorithm_${algorithm}`);
    if (compared.length < 2 || compared.some(({ recording }) => recording.algorithm !== algorithm)) return name;
    const { num_splits, page_size, block = "" } = settings;
    const own = num_splits ? `${this.language.text("num_splits")} ${num_splits}` : page_size ? `${this.language.text("page_size")} ${page_size}` : block.replace("x", " × ");
    return own ? `${name} · ${own}` : name;
  }

  /** The colours that this run has use for. */
  #showKey({ grid, trace }) {
    const ever = (times) => grid !== null && times.some((at) => at !== NEVER);
    const used = grid && trace.data.length === 0 ? { current: true, computed: true, stored: ever(grid.storedAt), weights: ever(grid.weightsStoredAt), skipped: ever(grid.skippedAt) } : {};
    for (const part of this.root.querySelectorAll("[data-state]")) part.hidden = !used[part.dataset.state];
    if (used.stored) this.root.querySelector("[data-state=computed]").hidden = true;
  }

  #showChoices(recording, choices) {
    const form = this.details.querySelector(".settings");
    const fields = OWN.filter((parameter) => choices[parameter]).map((parameter) => {
      const select = element("select", { name: parameter });
      fillChoices(select, choices[parameter], recording.settings[parameter], (value) => this.#choiceName(parameter, value, recording), this.language);
      select.addEventListener("change", () => this.actions.chooseOwn(parameter, readChoice(select)));
      return element("label", {}, element("span", {}, this.language.text(parameter)), select);
    });
    form.replaceChildren(...fields);
  }

  #choiceName(parameter, value, recording) {
    if (value !== "auto") return String(value).replace("x", " × ");
    const { block_m, block_n, block } = recording.settings;
    const sizes = block === "auto" && block_m ? ` (${block_m} × ${block_n})` : "";
    return this.language.text("block_auto") + sizes;
  }

  /** `at`: events that have happened, with the share of the next one. */
  draw(at, { row, colours, card, moves }) {
    const { trace } = this.run;
    const position = Math.floor(at);
    const event = position > 0 ? trace.event(position - 1) : null;
    const tiles = trace.tilesAt(position);
    const watched = this.statistics.nearestRow(row);
    this.scene.draw(at, tiles, colours, watched, moves);
    this.#fillBars(position);
    const due = !moves.playing || performance.now() - this.said >= CALM;
    if (due) this.#say(position, event, watched);
    for (const [key, target] of this.counters) setCounter(target, trace[COUNTERS[key][0]][position], COUNTERS[key][1]);
    this.sram.draw(tiles);
    this.hbm.draw(position);
    this.statistics.draw(position, watched);
    for (const view of [this.programs, this.pages, this.timeline, this.merge, this.readouts, this.arithmetic]) view.draw(position);
    this.#drawBound(costAt(trace, position, card));
  }

  /** Words and numbers of the present event: while the run plays, only as often as one can read. */
  #say(position, event, watched) {
    const { trace, recording } = this.run;
    const { language, baseline } = this;
    this.said = performance.now();
    setCounter(this.step, position, () => `${position} / ${trace.length}`);
    setText(this.now, event ? describe(event, trace.dataAt(position), language) : language.text("before_start"));
    const line = lineOf(recording.algorithm, event);
    setText(this.line, line ? language.text("line", { ...line, paper: paperName(line.paper, language) }) : "");
    this.pseudocode.draw(line ?? lastLine(this.run, position));
    setText(this.formula, formulaOf(this.run, position, watched));
    setCounter(this.held.words, trace.scoresHeld[position], (held) => language.text("held_of", { held: formatCount(held), all: formatCount(this.mostScores) }));
    const moved = formatBytes(trace.moved[position]);
    if (baseline) setCounter(this.moved.words, trace.moved[position] / allMoved({ recording: baseline }), (share) => (baseline === recording ? moved : language.text("of_standard", { moved, share: threeDigits(100 * share) })));
  }

  /** Both bars grow with every frame. */
  #fillBars(position) {
    const { trace } = this.run;
    setStyle(this.held.bar, "transform", `scaleX(${trace.scoresHeld[position] / this.mostScores})`);
    if (this.baseline) setStyle(this.moved.bar, "transform", `scaleX(${Math.min(trace.moved[position] / allMoved({ recording: this.baseline }), 1)})`);
  }

  #drawBound(cost) {
    const key = cost.intensity === 0 ? "bound_none" : cost.memory >= cost.compute ? "bound_memory" : "bound_compute";
    this.bound.dataset.value = key;
    setText(this.bound, this.language.text(key, {
      memory: formatSeconds(cost.memory), compute: formatSeconds(cost.compute), intensity: threeDigits(cost.intensity),
    }));
  }
}

/** What an event does, in words; `data` is of the last change of block tables. */
function describe(event, data, language) {
  if (event.kind === "page") return language.text(`page_${data.op}`, data);
  const [rows, keys] = [formatRange(event.row, event.rows), formatRange(event.col, event.cols)];
  const whole = ["place", "empty", "release"].includes(event.kind);
  const thing = `thing_${event.array}${"SP".includes(event.array) ? "_tile" : ""}`;
  const named = !whole && rows && language.textOr(thing, "");
  const places = { tile: named ? language.text(thing, { rows, keys }) : event.name, bytes: formatBytes(event.bytes), op: prettyOp(event.op || event.name), flops: formatFlops(event.matmul + event.other), rows, keys };
  return language.text(isEmpty(event) ? "event_start" : `event_${event.kind}`, places);
}

function fillChoices(select, choices, value, nameOf, language) {
  select.replaceChildren(...choices.map(({ value: choice, needs }) => {
    const name = nameOf(choice) + (needs === null ? "" : ` (${language.text("needs_sram", { bytes: formatBytes(needs) })})`);
    return element("option", { value: choice, disabled: needs === null ? null : "" }, name);
  }));
  select.value = value;
  select.dataset.numbers = typeof choices[0]?.value === "number" ? "yes" : "";
}

function readChoice(select) {
  return select.dataset.numbers ? Number(select.value) : select.value;
}
