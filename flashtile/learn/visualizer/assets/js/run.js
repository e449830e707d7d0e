// One run on the page: its own settings, its matrix, memories and counters.

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
  return { recording, trace, grid: trace.grid || null, kernels: trace.kernels, chain };
}

class RunView {
  /** `actions`: chooseRow(row), chooseOwn(parameter, value), openArithmetic(open). */
  constructor(name, language, actions) {
    this.name = name;
    this.language = language;
    this.actions = actions;
    this.root = document.getElementById("run").content.cloneNode(true).firstElementChild;
    this.root.dataset.run = name;
    this.root.classList.add(name);
    this.title = this.root.querySelector("h2");
    this.about = this.root.querySelector(".about");
    this.now = this.root.querySelector(".now");
    this.step = this.root.querySelector("[data-counter=position]");
    this.line = this.root.querySelector(".line");
    this.bound = this.root.querySelector("[data-counter=bound]");
    this.share = this.root.querySelector(".beside i");
    this.ratio = this.root.querySelector("[data-counter=beside_standard]");
    this.beside = this.root.querySelector(".beside");
    this.counters = Object.keys(COUNTERS).map((key) => [key, this.root.querySelector(`[data-counter=${key}]`)]);
    this.matrix = new MatrixView(this.root.querySelector("canvas"), actions.chooseRow);
    this.sram = new SramView(this.root);
    this.hbm = new HbmView(this.root);
    this.statistics = new StatisticsView(this.root, actions.chooseRow);
    this.programs = new ProgramsView(this.root, language);
    this.pages = new PagesView(this.root, language);
    this.timeline = new TimelineView(this.root);
    this.merge = new MergeView(this.root, language);
    this.readouts = new ReadoutsView(this.root, language);
    this.pseudocode = new PseudocodeView(this.root, language);
    this.formula = this.root.querySelector(".formula");
    this.arithmetic = new ArithmeticView(this.root, language, actions.openArithmetic);
  }

  show(run, choices, baseline, sram) {
    this.run = run;
    this.baseline = baseline;
    const { recording, trace } = run;
    this.language.apply(this.root);
    setText(this.title, this.language.text(`algorithm_${recording.algorithm}`));
    setText(this.about, this.language.text(`about_${recording.algorithm}`));
    this.#showChoices(recording, choices);
    this.root.querySelector(".matrix").hidden = run.grid === null; // before its canvas is measured
    this.matrix.show(run);
    this.sram.show(sram);
    this.hbm.show(trace);
    this.statistics.show(trace);
    this.programs.show(run);
    this.pages.show(run);
    this.timeline.show(run);
    this.merge.show(trace);
    this.readouts.show(run);
    this.pseudocode.show(run);
    this.arithmetic.show(run);
    this.beside.hidden = baseline === null;
  }

  #showChoices(recording, choices) {
    const form = this.root.querySelector(".settings");
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

  draw(position, { row, colours, card }) {
    const { trace } = this.run;
    const event = position > 0 ? trace.event(position - 1) : null;
    const tiles = trace.tilesAt(position);
    const watched = this.statistics.nearestRow(row);
    setText(this.now, event ? describe(event, trace.dataAt(position), this.language) : this.language.text("before_start"));
    setText(this.step, `${position} / ${trace.length}`);
    const line = lineOf(this.run.recording.algorithm, event);
    setText(this.line, line ? this.language.text("line", line) : "");
    this.step.dataset.value = position;
    for (const [key, target] of this.counters) setCounter(target, trace[COUNTERS[key][0]][position], COUNTERS[key][1]);
    this.matrix.draw(position, tiles, colours, watched);
    this.sram.draw(tiles);
    this.hbm.draw(position);
    this.statistics.draw(position, watched);
    this.programs.draw(position);
    this.pages.draw(position);
    this.timeline.draw(position);
    this.merge.draw(position);
    this.readouts.draw(position);
    this.pseudocode.draw(line ?? lastLine(this.run, position));
    setText(this.formula, formulaOf(this.run, position, watched));
    this.arithmetic.draw(position);
    this.#drawCost(costAt(trace, position, card), trace.moved[position]);
  }

  #drawCost(cost, moved) {
    const key = cost.intensity === 0 ? "bound_none" : cost.memory >= cost.compute ? "bound_memory" : "bound_compute";
    this.bound.dataset.value = key;
    setText(this.bound, this.language.text(key, {
      memory: formatSeconds(cost.memory), compute: formatSeconds(cost.compute), intensity: threeDigits(cost.intensity),
    }));
    if (this.baseline === null) return;
    const all = this.baseline.totals.hbm_read + this.baseline.totals.hbm_written;
    setStyle(this.share, "transform", `scaleX(${Math.min(moved / all, 1)})`);
    this.ratio.dataset.value = moved / all;
    setText(this.ratio, this.language.text("of_standard", { share: threeDigits((100 * moved) / all), all: formatBytes(all) }));
  }
}

/** What an event does, in words; `data` is of the last change of block tables. */
function describe(event, data, language) {
  if (event.kind === "page") return language.text(`page_${data.op}`, data);
  const place = [formatRange(event.row, event.rows), formatRange(event.col, event.cols)].filter(Boolean).join(", ");
  const tile = place && !(event.kind === "place" || event.kind === "empty" || event.kind === "release") ? `${event.name}[${place}]` : event.name;
  const places = {
    tile, bytes: formatBytes(event.bytes), op: (event.op || event.name).replaceAll("^T", "ᵀ"), flops: formatFlops(event.matmul + event.other),
    rows: formatRange(event.row, event.rows), keys: formatRange(event.col, event.cols),
  };
  return language.text(`event_${event.kind}`, places);
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
