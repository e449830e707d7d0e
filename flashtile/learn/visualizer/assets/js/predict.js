// Predict, then see: questions about the run that is shown, whose answers are counted from its events.

const PREDICTIONS = {
  tiles: ({ run }) => {
    if (!run.grid) return null;
    const { computedAt, width, height } = run.grid;
    const right = computedAt.filter((at) => at !== NEVER).length;
    return { right, others: [width + height, width * height, width * height * 2, Math.ceil((width * height) / 4)], places: { rows: height, cols: width } };
  },
  output: ({ run }) => {
    const { trace } = run;
    const touches = (i) => trace.forms[trace.form[i]].array === "O" && trace.forms[trace.form[i]].kind === "store" && trace.row[i] === 0;
    const right = Array.from({ length: trace.length }, (_, i) => i).filter(touches).length;
    if (right === 0) return null;
    return { right, others: [1, 2, run.grid ? run.grid.width : 4, run.grid ? run.grid.width + 1 : 8], places: {} };
  },
  bytes: ({ run, baseline }) => {
    if (!baseline || baseline === run.recording) return null;
    const [right, theirs] = [allMoved(run), allMoved({ recording: baseline })];
    return { right, others: [theirs, right * 2, Math.round(right / 2), right * 4], places: { theirs: formatBytes(theirs) }, format: formatBytes };
  },
  held: ({ run }) => {
    if (!run.grid) return null;
    const { all, held } = scoresHeld(run.trace, run.grid);
    const side = run.grid.rowEdges.at(-1);
    return { right: held, others: [all, side, held * 4, Math.max(1, Math.round(held / 4))], places: { all } };
  },
};
const MOST_CHOICES = 4;

class Predict {
  constructor(page) {
    this.page = page;
    this.root = document.querySelector(".predict");
    this.question = this.root.querySelector("p");
    this.choices = this.root.querySelector(".choices");
    this.reveal = this.root.querySelector(".reveal");
    document.querySelector("#predict").addEventListener("click", () => this.toggle());
    this.root.querySelector("#predict-next").addEventListener("click", () => this.#next());
    this.root.querySelector("#predict-end").addEventListener("click", () => this.page.change({ predict: null }));
  }

  toggle() {
    return this.page.change({ predict: this.root.hidden ? this.names[0] : null });
  }

  #next() {
    return this.page.change({ predict: this.names[(this.names.indexOf(this.page.state.predict) + 1) % this.names.length] });
  }

  /** Called when the state has changed. */
  show(baseline) {
    const { page } = this;
    const known = { run: page.runs.a, baseline: baseline.a };
    const asked = Object.fromEntries(Object.entries(PREDICTIONS).map(([name, ask]) => [name, ask(known)]).filter(([, question]) => question));
    this.names = Object.keys(asked);
    const name = page.state.predict;
    this.root.hidden = !(name in asked);
    document.querySelector("#predict").setAttribute("aria-pressed", String(!this.root.hidden));
    if (this.root.hidden) {
      document.body.dataset.predicting = "no";
      this.shown = undefined;
      return;
    }
    const shown = JSON.stringify([name, page.language.name, asked[name], page.runs.a.recording.settings]);
    if (shown === this.shown) return; // an answer that was given stays
    this.shown = shown;
    this.#ask(name, asked[name]);
  }

  #ask(name, { right, others, places, format = String }) {
    const { language } = this.page;
    const { recording } = this.page.runs.a;
    const premise = language.text("predict_premise", { algorithm: language.text(`algorithm_${recording.algorithm}`), seqlen: recording.settings.seqlen, mask: language.text(`mask_${recording.settings.mask}`) });
    setText(this.question, `${premise} ${language.text(`predict_${name}`, places)}`);
    const values = [...new Set([right, ...others])].filter((value) => value > 0).slice(0, MOST_CHOICES).sort((x, y) => x - y);
    this.reveal.hidden = true;
    document.body.dataset.predicting = "yes"; // what would give the answer away is blurred
    this.choices.replaceChildren(...values.map((value) => {
      const button = element("button", { type: "button", "data-choice": value }, format(value));
      button.addEventListener("click", () => {
        for (const other of this.choices.children) if (Number(other.dataset.choice) === right) other.dataset.right = "yes";
        button.setAttribute("aria-pressed", "true");
        this.reveal.hidden = false;
        document.body.dataset.predicting = "no";
        const verdict = language.text(value === right ? "predict_right" : "predict_wrong", { right: format(right) });
        setText(this.reveal, `${verdict} ${language.text(`reveal_${name}`, { ...places, right: format(right) })}`);
      });
      return button;
    }));
  }
}
