// The page: its state, its three views (home, the stage, a story), and what is drawn when.

const THEMES = ["auto", "light", "dark"];
const COLOUR_NAMES = {
  untouched: "--untouched", skipped: "--skipped", computed: "--computed", stored: "--stored", weights: "--weights",
  hidden: "--hidden", track: "--track", soft: "--ink-2", ink: "--ink", card: "--paper", panel: "--panel", line: "--line",
  accent: "--accent", onTile: "--on-tile", statistics: "--statistics", Q: "--q", K: "--k", V: "--v", S: "--s", P: "--p", O: "--o",
};
const DEFAULTS = {
  a: { algorithm: "flash2", block: "64x64" }, b: null, queries: "all", seqlen: 1024, head_dim: 64, mask: "full", sram: 102400, sync: "share", at: 0,
};
const OF_THE_FRAME = ["lang", "theme", "drawer", "arithmetic"]; // parts of the state that change no view
const AT_HOME = ["lang", "theme"]; // all that an address of the landing view says

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
    for (const [holder, part] of [[".stage", "root"], [".panels", "panel"], [".every", "details"]]) {
      document.querySelector(holder).append(...Object.values(this.views).map((view) => view[part]));
    }
    this.traffic = new TrafficChart(document.querySelector(".traffic"), this.language);
    this.roofline = new RooflineChart(document.querySelector(".roofline"), this.language);
    this.clock = new Clock(() => this.draw());
    this.phases = new Phases(this.clock, this.language);
    this.controls = new Controls(this);
    this.articles = new Articles(this);
    this.predict = new Predict(this);
    this.export = new Export(this);
    this.stories = new Stories(this);
    this.tour = new Tour(this);
    this.home = new Home(this);
    this.begins = Object.keys(data.start).length > 0 ? data.start : { home: true };
    this.state = { ...DEFAULTS, ...this.begins };
    this.shown = Promise.resolve();
    document.body.classList.toggle("embed", new URLSearchParams(location.search).get("embed") === "1");
  }

  start() {
    window.addEventListener("hashchange", () => this.#readAddress());
    new ResizeObserver(() => this.#resize()).observe(document.querySelector(".stage"));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#theme());
    document.addEventListener("visibilitychange", () => document.hidden && this.clock.pause());
    this.#readAddress();
  }

  #readAddress() {
    if (location.hash === this.address) return;
    const { a, b, ...rest } = readAddress(location.hash);
    const says = Object.keys({ ...rest, ...(a && { a }) });
    const next = { ...this.state, ...rest };
    if (a) Object.assign(next, { a, b: b ?? null });
    next.home = says.every((key) => AT_HOME.includes(key)) ? Boolean(this.begins.home) : null;
    if (next.home) Object.assign(next, { tour: null, scene: null, story: null, question: null });
    this.atHome = Boolean(next.home); // the browser's history has this step already
    this.state = next;
    this.#chooseLanguage();
    if (rest.tour && !a && !rest.story) this.tour.begin(rest.tour, rest.scene);
    else this.show();
  }

  #chooseLanguage() {
    const { lang } = this.state;
    this.language.name = lang in LANGUAGES ? lang : Language.preferred();
  }

  /** Change parts of the state and show it. */
  change(parts) {
    if (parts.question) parts = { ...parts, story: null, variant: null, tour: null };
    this.state = { ...this.state, at: Math.floor(this.clock.at), ...parts };
    if (Object.keys(parts).some((key) => !OF_THE_FRAME.includes(key))) this.state.home = parts.home ?? null;
    return this.show();
  }

  ask(question) {
    this.clock.pause();
    return this.change({ ...question.state, question: question.name }).then(() => this.play(question.speed));
  }

  /** Play from here, unless the reader wants nothing to move by itself. */
  play(speed) {
    if (stillness.matches) return;
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
    this.#chooseLanguage();
    document.documentElement.lang = language.name === "zh" ? "zh-CN" : "en";
    this.#theme();
    this.card = catalog.cards.find(({ key }) => key === state.card) ?? catalog.cards[0];
    this.controls.showFrame();
    if (state.home) return this.#goHome();
    this.#turnTo("stage");
    if (await this.stories.show()) return;
    const settled = this.#resolve();
    const baseline = Object.fromEntries(Object.entries(settled).map(([name, { recording }]) => [name, catalog.standardFor(recording, this.sram) ?? null]));
    const runs = {};
    for (const [name, { recording }] of Object.entries(settled)) runs[name] = await loadRun(catalog, recording);
    const shown = Object.values(settled).map(({ recording }) => recording);
    const standard = baseline.a && !shown.includes(baseline.a) ? await loadRun(catalog, baseline.a) : null;
    this.#present(settled, runs, baseline, standard);
  }

  #goHome() {
    this.clock.pause();
    this.#turnTo("home");
    this.tour.show();
    this.home.show();
    this.#writeAddress();
  }

  /** A view begins at its top. */
  #turnTo(view) {
    if (document.body.dataset.view !== view) document.querySelector("main").scrollTop = 0;
    document.body.dataset.view = view;
  }

  /** All at once, so that no frame is drawn of half of it. */
  #present(settled, runs, baseline, standard) {
    this.runs = runs;
    document.body.classList.toggle("two", "b" in runs);
    this.views.b.hidden = !("b" in runs);
    this.clock.setRuns(Object.values(runs), this.state.sync === "bytes" ? "bytes" : "share");
    this.#place(this.state.at);
    this.predict.show(baseline);
    this.tour.show();
    for (const [name, run] of Object.entries(runs)) {
      this.views[name].arithmetic.root.open = this.state.arithmetic === "open";
      this.views[name].show(run, settled[name].choices, baseline[name], settled[name].sram, Object.values(runs));
    }
    const compared = Object.entries(runs).map(([run, { trace }]) => ({ run, trace }));
    this.chartRuns = standard ? [...compared, { run: "standard", trace: standard.trace }] : compared;
    this.traffic.show(this.chartRuns);
    this.roofline.show(this.card, compared);
    this.phases.show(Object.values(runs));
    this.controls.show(settled);
    this.articles.show(settled);
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
    const probe = document.querySelector("header"); // resolves a variable to the colour of the present scheme
    const resolved = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    this.colours = Object.fromEntries(Object.entries(COLOUR_NAMES).map(([key, name]) => [key, resolved(name)]));
    probe.style.removeProperty("color");
    this.draw();
  }

  #resize() {
    if (!this.runs || document.body.dataset.view !== "stage") return;
    for (const name of Object.keys(this.runs)) this.views[name].scene.resize();
    this.draw();
  }

  draw() {
    if (document.body.dataset.view === "home") return;
    if (this.stories.open) return this.#drawStory();
    if (!this.runs) return;
    const positions = {};
    const moves = { playing: this.clock.playing, rate: this.clock.rate };
    for (const [name, run] of Object.entries(this.runs)) {
      positions[name] = this.clock.positionOf(run);
      const at = moves.playing ? this.clock.momentOf(run) : positions[name];
      this.views[name].draw(at, { row: this.state.row, colours: this.colours, card: this.card, moves });
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
    const home = Boolean(this.state.home);
    if (home === this.atHome) history.replaceState(null, "", address);
    else history.pushState(null, "", address); // so that Back leads from a tour to the landing view
    this.atHome = home;
  }
}

function pick(object, keys) {
  return Object.fromEntries(keys.filter((key) => object[key] !== undefined).map((key) => [key, object[key]]));
}

const embedded = (id) => JSON.parse(document.getElementById(`${id}-data`).textContent);
const catalog = embedded("catalog");
catalog.recordings = await unpack(catalog.recordings);
window.flashtilePage = new Page({ catalog, texts: embedded("texts"), start: embedded("start") });
window.flashtilePage.start();
