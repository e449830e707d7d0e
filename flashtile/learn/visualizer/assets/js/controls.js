// Everything that one can press: the choices, the player, the questions, the keyboard.

const OF_RUNS = ["x", "p", "a", "s", "v", "d"]; // keys that stories have no use for
const AT_HOME_KEYS = /^[1-5lt?]$/; // keys of the landing view
const SWIPE = 50; // pixels
const SPEEDS = [0.05, 0.25, 1, 4, 16];

class Controls {
  constructor(page) {
    this.page = page;
    this.find = (selector) => document.querySelector(selector);
    this.slider = this.find("#position");
    this.playButton = this.find("#play");
    this.#choices();
    this.#drawer();
    this.#player();
    this.#questions();
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  #choices() {
    const { page } = this;
    this.selects = Object.fromEntries(["a", "b", ...SHARED, "sram", "card", "sync"].map((name) => [name, this.find(`#choose-${name}`)]));
    const { a, b, sync, ...others } = this.selects;
    a.addEventListener("change", () => page.change({ a: { ...page.state.a, algorithm: a.value }, question: null }));
    b.addEventListener("change", () => page.change({ b: b.value ? { ...page.state.b, algorithm: b.value } : null, question: null }));
    sync.addEventListener("change", () => page.change({ sync: sync.value }));
    for (const [name, select] of Object.entries(others)) {
      select.addEventListener("change", () => page.change({ [name]: readChoice(select), ...(name === "card" ? {} : { question: null, preset: null, element: null, inputs: null, words: null }) }));
    }
    this.find("#swap").addEventListener("click", () => this.#swap());
    this.find("#language").addEventListener("click", () => this.#nextLanguage());
    this.find("#theme").addEventListener("click", () => this.#nextTheme());
    this.find("#help").addEventListener("click", () => this.find("#keys").showModal());
  }

  /** Everything else is in a drawer, which covers the explanations while it is open. */
  #drawer() {
    this.drawer = this.find("#drawer");
    this.find("#open-drawer").addEventListener("click", () => this.#toggleDrawer());
    this.find("#close-drawer").addEventListener("click", () => this.#toggleDrawer());
    this.find("#home").addEventListener("click", () => this.page.change({ home: true, tour: null, question: null, drawer: null, story: null, predict: null }));
    document.querySelector("main").addEventListener("touchstart", ({ touches }) => (this.touched = touches.length === 1 ? [touches[0].clientX, touches[0].clientY] : null), { passive: true });
    document.querySelector("main").addEventListener("touchend", ({ changedTouches }) => this.#swiped(changedTouches[0]), { passive: true });
  }

  async #toggleDrawer() {
    const opens = this.page.state.drawer !== "open";
    await this.page.change({ drawer: opens ? "open" : null, arithmetic: null });
    this.find(opens ? "#drawer" : "#open-drawer").focus();
  }

  /** To the side: the next scene of a tour or the next tile, or the one before. */
  #swiped({ clientX, clientY }) {
    if (!this.touched) return;
    const [across, down] = [clientX - this.touched[0], clientY - this.touched[1]];
    if (Math.abs(across) > SWIPE && Math.abs(across) > 2 * Math.abs(down)) this.#turn(across < 0 ? 1 : -1, true);
  }

  /** Scenes of a tour, else events or tiles. */
  #turn(direction, byTile) {
    if (this.page.tour.open) this.page.tour.turn(direction);
    else if (document.body.dataset.view !== "home") this.page.clock.step(direction, byTile);
  }

  #player() {
    const { clock } = this.page;
    this.playButton.addEventListener("click", () => clock.toggle());
    this.find("#start").addEventListener("click", () => clock.seek(0));
    this.find("#back").addEventListener("click", () => clock.step(-1, false));
    this.find("#forward").addEventListener("click", () => clock.step(1, false));
    this.find("#next-tile").addEventListener("click", () => clock.step(1, true));
    this.slider.addEventListener("input", () => {
      const at = Number(this.slider.value); // drawing puts the slider back to where the clock is
      clock.pause();
      clock.seek(at);
    });
    this.speed = this.find("#speed");
    this.speed.replaceChildren(...SPEEDS.map((speed) => element("option", { value: speed }, `${speed}×`)));
    this.speed.value = 1;
    this.speed.addEventListener("change", () => this.page.change({ speed: Number(this.speed.value) }));
  }

  setSpeed(speed) {
    this.speed.value = speed;
    this.page.state.speed = this.page.clock.speed = speed;
  }

  #questions() {
    this.questions = QUESTIONS.filter(({ state }) => this.answerable(state)).map((question, i) => {
      const button = element("button", { type: "button", "data-question": question.name, "data-text": `question_${question.name}`, "aria-keyshortcuts": String(i + 1) });
      button.addEventListener("click", () => this.page.ask(question));
      return { ...question, button };
    });
    document.querySelector(".home .questions").append(...this.questions.map(({ button }) => button));
    this.answer = this.find(".answer");
  }

  /** Whether the recordings hold what a question compares. */
  answerable({ a, b, ...rest }) {
    const shared = pick(rest, SHARED);
    return [a, b].filter(Boolean).every((run) => this.page.catalog.has({ ...shared, ...run }));
  }

  /** Called when the state has changed. */
  show({ a, b }) {
    const { page } = this;
    const { language, catalog, state } = page;
    this.showFrame();
    const algorithms = catalog.algorithms.map((value) => ({ value, needs: null }));
    const algorithmName = (value) => (value ? language.text(`algorithm_${value}`) : language.text("nothing"));
    fillChoices(this.selects.a, algorithms, state.a.algorithm, algorithmName, language);
    fillChoices(this.selects.b, [{ value: "", needs: null }, ...algorithms], state.b?.algorithm ?? "", algorithmName, language);
    for (const parameter of SHARED) {
      const nameOf = (value) => (language.textOr(`${parameter}_${value}`, String(value)));
      fillChoices(this.selects[parameter], a.choices[parameter] ?? [], state[parameter], nameOf, language);
      this.selects[parameter].closest("label").hidden = !a.choices[parameter];
    }
    fillChoices(this.selects.sram, [...new Set([...catalog.sramSizesOf(state.a.algorithm), page.sram])].sort((x, y) => x - y).map((value) => ({ value, needs: null })), page.sram, formatBytes, language);
    const cards = catalog.cards.map(({ key }) => ({ value: key, needs: null }));
    fillChoices(this.selects.card, cards, page.card.key, (key) => catalog.cards.find((card) => card.key === key).name, language);
    this.#showCompare(b);
    fillChoices(this.selects.sync, ["share", "bytes"].map((value) => ({ value, needs: null })), page.clock.sync, (value) => language.text(`sync_${value}`), language);
    this.#showAnswer();
  }

  #showCompare(b) {
    this.selects.sync.closest("label").hidden = !b;
    this.find("#swap").hidden = !b;
  }

  /** What stands around algorithms and stories alike. */
  showFrame() {
    const { language, clock, state } = this.page;
    language.apply(document);
    document.title = language.text("page_title");
    this.find("#language").textContent = LANGUAGES[language.name === "en" ? "zh" : "en"];
    this.find("#theme").textContent = language.text(`theme_${document.documentElement.dataset.theme}`);
    if (clock.leader) this.slider.max = clock.end;
    this.drawer.hidden = (state.drawer !== "open" && state.arithmetic !== "open") || Boolean(state.home) || this.page.stories.open;
    this.find("#open-drawer").setAttribute("aria-expanded", String(!this.drawer.hidden));
    if (SPEEDS.includes(state.speed)) this.setSpeed(state.speed);
  }

  #showAnswer() {
    const { page } = this;
    const asked = this.questions.find(({ name }) => name === page.state.question);
    for (const { button, name } of this.questions) button.setAttribute("aria-pressed", String(name === asked?.name));
    this.answer.hidden = !asked;
    if (!asked) return;
    const places = asked.answer({ ...page.runs, card: page.card });
    this.answer.dataset.places = JSON.stringify(places);
    const paragraphs = page.language.text(`answer_${asked.name}`, places).split("\n");
    this.answer.replaceChildren(...paragraphs.map((paragraph) => element("p", {}, paragraph)));
  }

  /** Called for each frame. */
  draw(clock) {
    const at = Math.floor(clock.at);
    if (Number(this.slider.value) !== at) this.slider.value = at;
    this.playButton.classList.toggle("playing", clock.playing);
    this.page.phases.draw(at);
    const label = this.page.language.text(clock.playing ? "pause" : "play");
    if (this.playButton.title !== label) {
      this.playButton.title = label;
      this.playButton.setAttribute("aria-label", label);
    }
  }

  #swap() {
    const { state } = this.page;
    if (state.b) this.page.change({ a: state.b, b: state.a, question: null });
  }

  async #toggleArithmetic() {
    const opens = this.page.state.arithmetic !== "open";
    await this.page.change({ arithmetic: opens ? "open" : null, drawer: opens ? "open" : null });
    if (opens) this.page.views.a.arithmetic.root.scrollIntoView();
  }

  #nextLanguage() {
    this.page.change({ lang: this.page.language.name === "en" ? "zh" : "en" });
  }

  #nextTheme() {
    const now = THEMES.indexOf(document.documentElement.dataset.theme);
    this.page.change({ theme: THEMES[(now + 1) % THEMES.length] });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const inField = event.target.closest("select, input, button");
    const { clock } = this.page;
    const keys = {
      ArrowRight: () => this.#turn(1, event.shiftKey),
      ArrowLeft: () => this.#turn(-1, event.shiftKey),
      Escape: () => this.page.state.drawer === "open" && this.#toggleDrawer(),
      h: () => this.find("#home").click(),
      d: () => this.#toggleDrawer(),
      Home: () => clock.seek(0),
      End: () => clock.seek(clock.end),
      " ": () => clock.toggle(),
      l: () => this.#nextLanguage(),
      t: () => this.#nextTheme(),
      x: () => this.#swap(),
      p: () => this.page.predict.toggle(),
      a: () => this.#toggleArithmetic(),
      c: () => this.page.export.link(),
      s: () => this.page.export.svg(),
      v: () => this.page.export.video(),
      "?": () => this.find("#keys").showModal(),
    };
    this.questions.forEach((question, i) => (keys[String(i + 1)] = () => this.page.ask(question)));
    const action = keys[event.key];
    const { view } = document.body.dataset;
    if (!action || (view === "home" && !AT_HOME_KEYS.test(event.key)) || (this.page.stories.open && OF_RUNS.includes(event.key))) return;
    // A select that was just used keeps the focus: arrows to the sides step all the same, other keys are its own.
    const aside = event.key === "ArrowLeft" || event.key === "ArrowRight";
    if (inField && ((inField.matches("select") && !aside) || inField.matches("input[type=text]") || (inField.matches("input[type=range]") && inField.id !== "position") || (event.key === " " && inField.matches("button")))) return;
    event.preventDefault();
    action();
  }
}
