// Stories: one idea each, told by a few short runs next to each other. A story's picture is in stories/NAME.js.
//
// A picture is a class with
//   static counters                  which of STORY_COUNTERS are shown with it
//   static pace(trace)               optional: what has passed after each event, where runs keep pace by that
//   constructor({ root, trace, facts, name, text, alone })
//   draw(position, event)            the run after `position` events, of which `event` is the last
//   numbers(position)                optional: numbers of its own, {key: [value, format]}, named by text number_KEY
//   caption(event, data, position)   optional: what an event does, in words

const STORY_VIEWS = {}; // the pictures by the names of their stories

const STORY_COUNTERS = {
  hbm_read: ["read", formatBytes],
  hbm_written: ["written", formatBytes],
  hbm_peak: ["hbmPeak", formatBytes],
  shared_read: ["sharedRead", formatBytes],
  shared_written: ["sharedWritten", formatBytes],
  barriers: ["barriers", String],
  matmul_flops: ["matmul", formatFlops],
  other_flops: ["other", formatFlops],
};

class StoryTrace extends Trace {
  constructor(packed, pace) {
    super(packed);
    this.sharedRead = this.sumOf((form) => (form.kind === "shared_load" ? form.bytes : 0));
    this.sharedWritten = this.sumOf((form) => (form.kind === "shared_store" ? form.bytes : 0));
    this.barriers = this.sumOf((form) => (form.kind === "barrier" ? 1 : 0));
    if (pace) this.moved = pace(this);
  }

  /** Running sums over the events: entry `i` is of the first `i`. */
  sumOf(count) {
    const sums = new Float64Array(this.length + 1);
    for (let i = 0; i < this.length; i++) sums[i + 1] = sums[i] + count(this.forms[this.form[i]], i);
    return sums;
  }

  /** The value of a statistic of row 0. */
  statistic(name, position) {
    const series = this.series.find((one) => one.name === name && one.row === 0);
    return series && this.valueAt(series, position);
  }

  /** Where the next loads begin. */
  nextTile(position, direction) {
    const loads = (i) => ["load", "shared_load", "page"].includes(this.forms[this.form[i]].kind);
    for (let i = position + direction; i > 0 && i < this.length; i += direction) {
      if (loads(i - 1) && (i === 1 || !loads(i - 2) || this.data.length > 0)) return i;
    }
    return direction > 0 ? this.length : 0;
  }
}

class Stories {
  constructor(page) {
    this.page = page;
    this.panels = [];
    this.root = document.querySelector(".story");
    this.title = this.root.querySelector("h2");
    this.told = document.querySelector(".about-story");
    this.about = this.told.querySelector(".about");
    this.variants = this.told.querySelector(".variants");
    this.stage = this.root.querySelector(".cases");
    this.variants.addEventListener("change", () => page.change({ variant: this.variants.value, at: 0 }));
    this.told.querySelector("#story-end").addEventListener("click", () => this.end());
    this.buttons = page.catalog.stories.map(({ name }) => {
      const button = element("button", { type: "button", "data-story": name, "data-text": `${name}.title` });
      button.addEventListener("click", () => this.tell(name));
      return button;
    });
    document.querySelector(".home .stories").append(...this.buttons);
  }

  get open() {
    return this.panels.length > 0;
  }

  tell(name) {
    const { page } = this;
    page.clock.pause();
    if (!this.open) this.before = Math.floor(page.clock.at);
    page.controls.playButton.focus({ preventScroll: true }); // so that Space pauses, and does not begin again
    return page.change({ story: name, variant: null, case: null, question: null, tour: null, predict: null, at: 0 }).then(() => page.play(1));
  }

  /** Back to the algorithms, where they were left. */
  end() {
    this.page.clock.pause();
    return this.page.change({ story: null, variant: null, case: null, at: this.before ?? DEFAULTS.at });
  }

  /** Show the story that the state names; whether there is one. */
  async show() {
    const { page } = this;
    const { state, catalog, language } = page;
    const story = catalog.stories.find(({ name }) => name === state.story);
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.story === story?.name));
    if (!story) {
      this.#close();
      return false;
    }
    const variants = [...new Set(story.cases.map(({ variant }) => variant))];
    state.variant = variants.includes(state.variant) ? state.variant : variants[0];
    const every = story.cases.filter(({ variant }) => variant === state.variant);
    const wanted = (state.case ?? "").split(",");
    const cases = every.some(({ name }) => wanted.includes(name)) ? every.filter(({ name }) => wanted.includes(name)) : every;
    const { pace } = STORY_VIEWS[story.name];
    const traces = await Promise.all(cases.map(({ packed }) => unpack(packed).then((trace) => new StoryTrace(trace, pace))));
    const text = (key, places) => language.text(`${story.name}.${key}`, places);
    this.panels = cases.map((entry, i) => new CasePanel(story.name, entry, traces[i], language, text, cases.length === 1));
    this.stage.replaceChildren(...this.panels.map(({ root }) => root));
    this.title.textContent = text("title");
    this.about.replaceChildren(...text("about").split("\n").map((paragraph) => element("p", {}, paragraph)));
    this.variants.closest("label").hidden = variants.length < 2;
    this.variants.replaceChildren(...variants.map((variant) => element("option", { value: variant }, variant && text(`variant_${variant}`))));
    this.variants.value = state.variant;
    this.root.hidden = this.told.hidden = false;
    document.body.dataset.view = "story";
    page.clock.setRuns(this.panels, pace ? "bytes" : "share");
    page.clock.at = Math.min(Math.max(Number(state.at) || 0, 0), page.clock.end);
    page.phases.show();
    page.controls.showFrame();
    page.tour.show();
    page.draw();
    return true;
  }

  #close() {
    this.panels = [];
    this.root.hidden = this.told.hidden = true;
  }

  /** Facts of the cases on the page, for the sentences of a tour. */
  places() {
    return Object.fromEntries(this.panels.flatMap(({ name, facts }) => Object.entries(facts).map(([fact, value]) => [`${name}_${fact}`, typeof value === "number" ? threeDigits(value) : value])));
  }

  draw() {
    for (const panel of this.panels) panel.draw(this.page.clock.positionOf(panel));
  }
}

/** One case of a story: its picture, what happens now, its numbers. */
class CasePanel {
  constructor(story, entry, trace, language, text, alone) {
    const View = STORY_VIEWS[story];
    Object.assign(this, { trace, language, name: entry.name, facts: entry.facts });
    this.root = document.getElementById("case").content.cloneNode(true).firstElementChild;
    this.root.dataset.case = entry.name;
    this.find = (selector) => this.root.querySelector(selector);
    this.step = this.find("[data-counter=position]");
    this.now = this.find(".now");
    language.apply(this.root);
    setText(this.find("h3"), text(`case_${entry.name}`));
    setText(this.find(".about"), text(`about_${entry.name}`));
    this.picture = new View({ root: this.find(".picture"), trace, facts: entry.facts, name: entry.name, text, alone });
    this.counters = View.counters.map((key) => [STORY_COUNTERS[key], this.#number(key, language.textOr(`story_${key}`, language.textOr(key, key)))]);
    const own = Object.keys(this.picture.numbers?.(0) ?? {});
    this.own = own.map((key) => [key, this.#number(key, text(`number_${key}`))]);
  }

  #number(key, label) {
    const target = element("dd", { "data-counter": key });
    this.find("dl").append(element("div", {}, element("dt", {}, label), target));
    return target;
  }

  draw(position) {
    if (position === this.drawn) return;
    this.drawn = position;
    const { trace, picture, language } = this;
    const event = position > 0 ? trace.event(position - 1) : null;
    const words = () => picture.caption?.(event, trace.dataAt(position), position) ?? describe(event, trace.dataAt(position), language);
    setText(this.now, event ? words() : language.text("before_start"));
    setText(this.step, `${position} / ${trace.length}`);
    this.step.dataset.value = position;
    for (const [[column, format], target] of this.counters) setCounter(target, trace[column][position], format);
    picture.draw(position, event);
    const own = picture.numbers?.(position) ?? {};
    for (const [key, target] of this.own) setCounter(target, ...own[key]);
  }
}
