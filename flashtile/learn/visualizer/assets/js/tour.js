// Guided tours: from standard attention over FlashAttention-3 and FP8 to pages, told in scenes that play by themselves.
// A scene has a sentence in texts/tours.json under tour_NAME_NUMBER; some ask before they play.

const RUN = { story: null, variant: null, case: null, queries: "all", mask: "full", b: null, sync: "share", element: null, inputs: null, words: null, sram: 102400 };
const SMALL = { ...RUN, seqlen: 8, head_dim: 4 };
const TWELVE = { ...RUN, seqlen: 12, head_dim: 4 };
const THOUSAND = { ...RUN, seqlen: 1024, head_dim: 64 };
const NOT_SPLIT = { algorithm: "flash2", block: "1x128" };
const ONE_QUERY = { ...RUN, queries: "one", seqlen: 4096, head_dim: 64 };
const PAGED = { ...RUN, queries: "one", seqlen: 64, head_dim: 64, a: { algorithm: "paged", page_size: 8 } };
const STANDARD = { algorithm: "standard" };
const TILED = { algorithm: "flash2", block: "4x4" };
const [BY_KEYS, BY_QUERIES] = ["flash1", "flash2"].map((algorithm) => ({ algorithm, block: "3x2" }));
const [FIRST, SECOND] = ["flash1", "flash2"].map((algorithm) => ({ algorithm, block: "64x64" }));
const SPLIT = { algorithm: "flash_decoding", block: "1x128", num_splits: 8 };
const softmax = (name, variant = "article") => ({ story: "softmax", variant, case: name });
const BACKWARD = { story: "backward", variant: "", case: "flash2" };
const turns = (names) => ({ story: "turns", variant: "", case: names });
const eight = (variant, names) => ({ story: "fp8", variant, case: names });
const MANY_SECONDS = 7;

/** `from` and `to`: a moment of moments.js, or a share of the clock. `right`: which of the choices is right. `says`: of a sentence, which the reader can change in the first scene. */
const TOURS = [
  { name: "slow", scenes: [
    { says: true, state: { ...SMALL, a: STANDARD }, from: 0, to: "scores_ready", seconds: 4 },
    { says: true, state: { ...SMALL, a: STANDARD }, from: "scores_ready", to: "scores_stored", seconds: 2 },
    { says: true, state: { ...SMALL, a: STANDARD }, from: "scores_stored", to: "weights_stored", seconds: 4 },
    { says: true, state: { ...SMALL, a: STANDARD }, from: "weights_stored", to: 1, seconds: 3 },
    { state: { ...THOUSAND, a: STANDARD }, from: 0, to: 1, seconds: MANY_SECONDS, right: 2, choices: 3 },
    { state: { ...THOUSAND, seqlen: 4096, a: STANDARD }, from: 0, to: 1, seconds: MANY_SECONDS },
  ] },
  { name: "tiles", scenes: [
    { state: { ...SMALL, a: TILED }, from: 0, to: "queries_loaded", seconds: 3 },
    { state: { ...SMALL, a: TILED }, from: "queries_loaded", to: "values_loaded", seconds: 4 },
    { state: { ...SMALL, a: TILED }, from: "values_loaded", to: "first_tile", seconds: 2 },
    { state: { ...SMALL, a: TILED }, from: "first_tile", to: "output_added", seconds: 4 },
    { state: { ...SMALL, a: TILED }, from: "output_added", to: "second_tile", seconds: 4, right: 1, choices: 3 },
    { state: { ...SMALL, a: TILED }, from: "second_tile", to: 1, seconds: 6 },
    { state: { ...THOUSAND, a: SECOND, b: STANDARD, sync: "bytes" }, from: 0, to: 1, seconds: 9 },
  ] },
  { name: "softmax", scenes: [
    { state: softmax("naive", "large"), from: 0, to: 1, seconds: 5 },
    { state: softmax("safe"), from: 0, to: 1, seconds: MANY_SECONDS },
    { state: softmax("average"), from: 0, to: "first_block", seconds: 5 },
    { state: softmax("average"), from: "first_block", to: "second_block", seconds: 5, right: 1, choices: 3 },
    { state: softmax("average"), from: "second_block", to: "second_output", seconds: 2 },
    { state: softmax("average"), from: "second_output", to: 1, seconds: 3 },
    { state: { ...SMALL, a: TILED }, from: "first_tile", to: 1, seconds: MANY_SECONDS },
  ] },
  { name: "loops", scenes: [
    { state: { ...TWELVE, a: BY_KEYS }, from: 0.06, to: 0.3, seconds: 6 },
    { state: { ...TWELVE, a: BY_KEYS }, from: 0.3, to: 1, seconds: 8, right: 2, choices: 3 },
    { state: { ...TWELVE, a: BY_QUERIES }, from: 0, to: 0.26, seconds: 6 },
    { state: { ...TWELVE, a: BY_QUERIES }, from: 0.26, to: 1, seconds: MANY_SECONDS },
    { state: { ...THOUSAND, a: FIRST, b: SECOND, sync: "bytes" }, from: 0, to: 1, seconds: 9 },
    { state: { ...THOUSAND, a: FIRST, b: SECOND, sync: "share" }, from: 0.4, to: 0.6, seconds: 6 },
  ] },
  { name: "gradients", scenes: [
    { state: BACKWARD, from: 0, to: "gradients_placed", seconds: 3 },
    { state: BACKWARD, from: "gradients_placed", to: "row_sums_ready", seconds: 5 },
    { state: BACKWARD, from: "row_sums_ready", to: "weights_again", seconds: 4, right: 1, choices: 3 },
    { state: BACKWARD, from: "weights_again", to: "score_gradients", seconds: 4 },
    { state: BACKWARD, from: "score_gradients", to: "keys_added", seconds: 4 },
    { state: BACKWARD, from: "keys_added", to: 1, seconds: 12, right: 2, choices: 3 },
    { state: { ...RUN, seqlen: 256, head_dim: 64, mask: "causal", a: { algorithm: "flash2_backward", block: "64x64" }, b: { algorithm: "standard_backward" }, sync: "bytes" }, from: 0, to: 1, seconds: 9 },
  ] },
  { name: "turns", scenes: [
    { state: turns("together"), from: 0, to: 0.27, seconds: MANY_SECONDS },
    { state: turns("together"), from: 0.27, to: 1, seconds: 9, right: 1, choices: 3 },
    { state: turns("pingpong"), from: 0, to: 0.3, seconds: MANY_SECONDS },
    { state: turns("pingpong"), from: 0.3, to: 1, seconds: 9 },
    { state: turns("together,pipelined"), from: 0, to: 1, seconds: 11, right: 0, choices: 3 },
    { state: turns("together,both"), from: 0, to: 1, seconds: 12 },
  ] },
  { name: "eight", scenes: [
    { state: { story: "rounding", variant: "", case: "plain" }, from: 0, to: 1, seconds: MANY_SECONDS },
    { state: { story: "rounding", variant: "", case: "scaled" }, from: 0, to: 1, seconds: MANY_SECONDS, right: 2, choices: 3 },
    { state: eight("huge", "tensor"), from: 0, to: 1, seconds: 5 },
    { state: eight("huge", "tensor,block"), from: 0, to: 1, seconds: 6 },
    { state: eight("column", "block"), from: 0, to: 1, seconds: 5 },
    { state: eight("column", "block,rotated"), from: 0, to: 1, seconds: 6, right: 1, choices: 3 },
    { state: { story: "sums", variant: "", case: "one,two" }, from: 0, to: 1, seconds: 12, right: 1, choices: 3 },
  ] },
  { name: "split", scenes: [
    { state: { ...ONE_QUERY, a: NOT_SPLIT }, from: 0, to: 0.3, seconds: 4 },
    { state: { ...ONE_QUERY, a: NOT_SPLIT }, from: 0.3, to: 1, seconds: 5, right: 0, choices: 3 },
    { state: { ...ONE_QUERY, a: SPLIT }, from: 0, to: "merge", seconds: MANY_SECONDS },
    { state: { ...ONE_QUERY, a: SPLIT }, from: "merge", to: 1, seconds: 5 },
    { state: { ...ONE_QUERY, a: NOT_SPLIT, b: SPLIT }, from: 0.5, to: 1, seconds: 5 },
    { state: { story: "unified", variant: "spike", case: "unified" }, from: 0, to: 1, seconds: 9 },
  ] },
  { name: "pages", scenes: [
    { state: PAGED, from: 0, to: "before_fork", seconds: 6 },
    { state: PAGED, from: "before_fork", to: "fork", seconds: 2, right: 2, choices: 3 },
    { state: PAGED, from: "fork", to: "copied", seconds: 4 },
    { state: PAGED, from: "copied", to: 1, seconds: 6 },
    { state: { story: "pool", variant: "", case: "longest" }, from: 0, to: 0.5, seconds: MANY_SECONDS },
    { state: { story: "pool", variant: "", case: "longest,pages" }, from: 0, to: 0.08, seconds: 9 },
  ] },
];

class Tour {
  constructor(page) {
    this.page = page;
    const find = (selector) => document.querySelector(selector);
    this.root = find(".guide.tour");
    const inside = (selector) => this.root.querySelector(selector);
    Object.assign(this, { sentence: inside(".sentence"), ask: inside(".ask"), choices: inside(".choices"), verdict: inside(".verdict"), dots: inside(".dots"), back: inside("#tour-back"), next: inside("#tour-next"), title: find(".tour-title"), log: find(".log") });
    this.back.addEventListener("click", () => this.turn(-1));
    this.next.addEventListener("click", () => this.turn(1));
    this.says = inside(".says");
    this.says.querySelector("input").addEventListener("input", ({ target }) => this.#say(target.value));
  }

  get tour() {
    return TOURS.find(({ name }) => name === this.page.state.tour);
  }

  get open() {
    return this.tour !== undefined && !this.root.hidden;
  }

  /** Tours whose runs this page has. */
  get offered() {
    const { catalog, controls } = this.page;
    return TOURS.filter(({ scenes }) => scenes.every(({ state }) => (state.story ? catalog.stories.some(({ name }) => name === state.story) : controls.answerable(state))));
  }

  /** Open a tour at a scene; where there is none, the page as it is. */
  begin(name, number = 1) {
    const known = this.offered.find((tour) => tour.name === name)?.scenes[number - 1];
    return known ? this.#go(name, number) : this.page.show();
  }

  /** To the next scene or the one before; past the last one, to the next tour. */
  turn(direction) {
    const number = this.page.state.scene + direction;
    if (number < 1) return undefined;
    if (number <= this.tour.scenes.length) return this.#go(this.tour.name, number);
    const after = this.#following;
    return after ? this.begin(after.name) : this.page.change({ home: true, tour: null, scene: null, story: null });
  }

  get #following() {
    const { offered } = this;
    return offered[offered.findIndex(({ name }) => name === this.page.state.tour) + 1];
  }

  async #go(name, number) {
    const { page } = this;
    page.clock.pause();
    const scene = TOURS.find((tour) => tour.name === name).scenes[number - 1];
    const words = scene.says ? (page.state.words ?? this.said ?? page.language.text("tour_words")) : null;
    await page.change({ ...scene.state, words, at: 0, tour: name, scene: number, question: null, predict: null, preset: null, drawer: null, arithmetic: null });
    page.clock.seek(this.#place(scene.from));
    if (scene.choices === undefined) this.#play(scene);
  }

  /** Another sentence: its scores are there at once. */
  async #say(words) {
    if (tokensOf(words).length < 2) return;
    this.said = words;
    await this.page.change({ words });
    this.page.clock.pause();
    this.page.clock.seek(this.#place(this.tour.scenes[this.page.state.scene - 1].to));
  }

  #play(scene) {
    const { clock } = this.page;
    const to = this.#place(scene.to);
    if (stillness.matches) clock.seek(to);
    else clock.playTo(to, scene.seconds);
  }

  /** The clock's time of a moment, or of a share of the whole. */
  #place(moment) {
    const { clock } = this.page;
    if (typeof moment === "number") return Math.round(moment * clock.end);
    return MOMENTS[moment](clock.leader) ?? 0;
  }

  /** Called when the state has changed. */
  show() {
    const { page, tour } = this;
    const { language, state } = page;
    const scene = tour?.scenes[state.scene - 1];
    this.root.hidden = this.title.hidden = !scene;
    const touring = Boolean(scene);
    if (document.body.classList.contains("touring") !== touring) this.log.open = !touring;
    document.body.classList.toggle("touring", touring);
    if (!scene) return;
    const key = `tour_${tour.name}_${state.scene}`;
    if (this.shown !== key) this.answered = scene.choices === undefined;
    this.shown = key;
    const places = this.#places();
    setText(this.title, language.text("tour_title", { title: language.text(`tour_${tour.name}`), number: state.scene, count: tour.scenes.length }));
    setText(this.sentence, language.text(key, places));
    this.dots.replaceChildren(...tour.scenes.map((_, i) => element("i", i + 1 === state.scene ? { class: "here" } : {})));
    this.back.disabled = state.scene === 1;
    const last = state.scene === tour.scenes.length;
    const after = this.#following;
    setText(this.next, !last ? language.text("tour_next") : after ? language.text("tour_after", { title: language.text(`tour_${after.name}`) }) : language.text("tour_done"));
    this.says.hidden = !scene.says || state.scene > 1;
    const field = this.says.querySelector("input");
    if (scene.says && document.activeElement !== field) field.value = state.words ?? "";
    this.#showQuestion(scene, key, places);
  }

  #showQuestion(scene, key, places) {
    const { language } = this.page;
    this.sentence.hidden = !this.answered;
    this.root.classList.toggle("answered", this.answered && scene.choices !== undefined);
    this.ask.hidden = scene.choices === undefined;
    if (!this.answered || scene.choices === undefined) this.verdict.hidden = true;
    if (this.ask.hidden) return;
    setText(this.ask.querySelector("p"), language.text(`${key}_ask`, places));
    const given = this.answered ? this.given : undefined;
    this.choices.replaceChildren(...Array.from({ length: scene.choices }, (_, i) => {
      const button = element("button", { type: "button", "data-choice": i }, language.text(`${key}_${i}`, places));
      if (this.answered && i === scene.right) button.dataset.right = "yes";
      if (given === i) button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => this.#answer(scene, key, i));
      return button;
    }));
  }

  #answer(scene, key, given) {
    const first = !this.answered;
    Object.assign(this, { answered: true, given });
    this.#showQuestion(scene, key, this.#places());
    this.verdict.hidden = false;
    setText(this.verdict, this.page.language.text(given === scene.right ? "tour_right" : "tour_wrong"));
    if (first) this.#play(scene);
  }

  /** Numbers of the runs on the page, for the sentences. */
  #places() {
    const { runs, card, catalog, sram, stories } = this.page;
    if (stories.open) return stories.places();
    const { a, b } = runs;
    const standardRun = catalog.standardFor(a.recording, sram);
    const cost = costAt(a.trace, a.trace.length, card);
    const theirs = b ? allMoved(b) : standardRun ? allMoved({ recording: standardRun }) : 0;
    const programs = (run) => Math.max(...run.kernels.map((kernel) => kernel.programs.length));
    const { seqlen } = a.recording.settings;
    return {
      tokens: seqlen, count: seqlen ** 2, moved: formatBytes(allMoved(a)), theirs: formatBytes(theirs), ratio: formatRatio(theirs / allMoved(a)), card: card.name, sm_count: card.sm_count,
      scores: Math.round((100 * movedBy(a, ["S", "P"])) / cost.bytes), compute: formatSeconds(cost.compute), memory: formatSeconds(cost.memory),
      chain: formatBytes(a.chain), chain_b: b && formatBytes(b.chain), extra: b && formatBytes(theirs - allMoved(a)), programs: programs(a), programs_b: b && programs(b),
    };
  }
}
