// The page: state, controls, and what is drawn when.

const THEMES = ["auto", "light", "dark"];
const COLOUR_NAMES = {
  untouched: "--untouched", skipped: "--skipped", computed: "--computed", stored: "--stored", weights: "--weights",
  hidden: "--hidden", track: "--track", soft: "--soft", ink: "--ink", card: "--card", statistics: "--statistics",
  Q: "--Q", K: "--K", V: "--V", S: "--S", P: "--P", O: "--O",
};
const DEFAULTS = {
  a: { algorithm: "flash2", block: "64x64" }, b: { algorithm: "standard" }, queries: "all", seqlen: 1024, head_dim: 64, mask: "full", sram: 102400, sync: "share", at: 900,
};

class Page {
  constructor(data) {
    this.catalog = new Catalog(data.catalog);
    this.language = new Language(data.texts);
    const actions = (name) => ({
      chooseRow: (row) => this.change({ row }),
      openArithmetic: (open) => this.change({ arithmetic: open ? "open" : null }),
      chooseOwn: (parameter, value) => this.change({ [name]: { ...this.state[name], [parameter]: value } }),
    });
    this.views = { a: new RunView("a", this.language, actions("a")), b: new RunView("b", this.language, actions("b")) };
    document.querySelector(".stage").append(this.views.a.root, this.views.b.root);
    this.traffic = new TrafficChart(document.querySelector(".traffic"), this.language);
    this.roofline = new RooflineChart(document.querySelector(".roofline"), this.language);
    this.clock = new Clock(() => this.draw());
    this.controls = new Controls(this);
    this.tour = new Tour(this);
    this.articles = new Articles(this);
    this.predict = new Predict(this);
    this.export = new Export(this);
    this.stories = new Stories(this);
    this.state = { ...DEFAULTS, ...data.start };
    this.shown = Promise.resolve();
  }

  start() {
    window.addEventListener("hashchange", () => this.#readAddress());
    window.addEventListener("resize", () => this.#resize());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#theme());
    document.addEventListener("visibilitychange", () => document.hidden && this.clock.pause());
    this.#readAddress();
  }

  #readAddress() {
    if (location.hash === this.address) return;
    const { a, b, ...rest } = readAddress(location.hash);
    const next = { ...this.state, ...rest };
    if (a) Object.assign(next, { a, b: b ?? null });
    this.state = next;
    this.show();
  }

  /** Change parts of the state and show it. */
  change(parts) {
    if (parts.question || parts.tour) parts = { ...parts, story: null, variant: null };
    this.state = { ...this.state, at: Math.floor(this.clock.at), ...parts };
    return this.show();
  }

  ask(question) {
    this.clock.pause();
    return this.change({ ...question.state, question: question.name, tour: null }).then(() => this.play(question.speed));
  }

  /** Play from here, unless the reader wants nothing to move by itself. */
  play(speed) {
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.controls.setSpeed(speed);
    this.clock.play();
  }

  /** One change after the other: loading a trace takes time. */
  show() {
    document.body.dataset.ready = "no";
    this.shown = this.shown.then(() => this.#show()).finally(() => (document.body.dataset.ready = "yes"));
    return this.shown;
  }

  async #show() {
    const { state, catalog, language } = this;
    language.name = state.lang in LANGUAGES ? state.lang : Language.preferred();
    document.documentElement.lang = language.name === "zh" ? "zh-CN" : "en";
    this.#theme();
    this.card = catalog.cards.find(({ key }) => key === state.card) ?? catalog.cards[0];
    if (await this.stories.show()) return;
    const settled = this.#resolve();
    const baseline = Object.fromEntries(Object.entries(settled).map(([name, { recording }]) => [name, catalog.standardFor(recording, this.sram) ?? null]));
    const runs = {};
    for (const [name, { recording }] of Object.entries(settled)) runs[name] = await loadRun(catalog, recording);
    const shown = Object.values(settled).map(({ recording }) => recording);
    const standard = baseline.a && !shown.includes(baseline.a) ? await loadRun(catalog, baseline.a) : null;
    this.#present(settled, runs, baseline, standard);
  }

  /** All at once, so that no frame is drawn of half of it. */
  #present(settled, runs, baseline, standard) {
    this.runs = runs;
    document.querySelector(".stage").classList.toggle("two", "b" in runs);
    this.views.b.root.hidden = !("b" in runs);
    for (const [name, run] of Object.entries(runs)) {
      this.views[name].arithmetic.root.open = this.state.arithmetic === "open";
      this.views[name].show(run, settled[name].choices, baseline[name], settled[name].sram);
    }
    const compared = Object.entries(runs).map(([run, { trace }]) => ({ run, trace }));
    this.chartRuns = standard ? [...compared, { run: "standard", trace: standard.trace }] : compared;
    this.traffic.show(this.chartRuns);
    this.roofline.show(this.card, compared);
    this.clock.setRuns(Object.values(runs), this.state.sync === "bytes" ? "bytes" : "share");
    this.#place(this.state.at);
    this.controls.show(settled);
    this.tour.show(baseline);
    this.articles.show(settled);
    this.predict.show(baseline);
    this.export.show();
    this.draw();
  }

  /** Settle both runs; `a` decides what is shared. */
  #resolve() {
    const { state, catalog } = this;
    const shared = pick(state, [...SHARED, ...OF_MADE]);
    const a = catalog.resolve({ ...shared, ...state.a }, state.sram);
    this.sram = a.sram;
    const common = pick(a.recording.settings, SHARED);
    const ofMade = pick(state, OF_MADE);
    const b = state.b ? catalog.resolve({ ...common, ...ofMade, ...state.b }, this.sram) : null;
    const own = ({ recording }) => ({ algorithm: recording.algorithm, ...pick(recording.settings, OWN) });
    Object.assign(this.state, { ...common, sram: this.sram, a: own(a), b: b && own(b) });
    return b ? { a, b } : { a };
  }

  #place(at) {
    if (at in MOMENTS) {
      const [run, position] = Object.values(this.runs).map((run) => [run, MOMENTS[at](run)]).find(([, found]) => found !== undefined) ?? [this.clock.leader, 0];
      this.clock.at = this.clock.placeOf(run, position);
    } else {
      this.clock.at = Math.min(Math.max(Number(at) || 0, 0), this.clock.end);
    }
    this.state.at = Math.floor(this.clock.at);
  }

  #theme() {
    const theme = THEMES.includes(this.state.theme) ? this.state.theme : "auto";
    document.documentElement.dataset.theme = theme;
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(Object.entries(COLOUR_NAMES).map(([key, name]) => [key, style.getPropertyValue(name).trim()]));
    this.draw();
  }

  #resize() {
    for (const name of Object.keys(this.runs ?? {})) this.views[name].matrix.resize();
    if (this.runs) this.draw();
  }

  draw() {
    if (this.stories.open) return this.#drawStory();
    if (!this.runs) return;
    const positions = {};
    for (const [name, run] of Object.entries(this.runs)) {
      positions[name] = this.clock.positionOf(run);
      this.views[name].draw(positions[name], { row: this.state.row, colours: this.colours, card: this.card });
    }
    const last = this.chartRuns.at(-1);
    if (last.run === "standard") positions.standard = this.clock.positionOf(last);
    this.traffic.draw(positions);
    this.roofline.draw(Object.entries(this.runs).map(([name, { trace }]) => costAt(trace, positions[name], this.card)));
    this.controls.draw(this.clock);
    if (!this.clock.playing) this.#writeAddress();
  }

  #drawStory() {
    this.stories.draw();
    this.controls.draw(this.clock);
    if (!this.clock.playing) this.#writeAddress();
  }

  #writeAddress() {
    const address = writeAddress({ ...this.state, at: Math.floor(this.clock.at) });
    if (address === this.address) return;
    this.address = address;
    history.replaceState(null, "", address);
  }
}

function pick(object, keys) {
  return Object.fromEntries(keys.filter((key) => object[key] !== undefined).map((key) => [key, object[key]]));
}

const embedded = (id) => JSON.parse(document.getElementById(`${id}-data`).textContent);
window.flashtilePage = new Page({ catalog: embedded("catalog"), texts: embedded("texts"), start: embedded("start") });
window.flashtilePage.start();
