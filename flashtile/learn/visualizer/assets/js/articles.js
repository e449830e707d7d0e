// The worked figures of articles and papers, each with its own numbers; and any small run that one likes.

const FROM_START = { queries: "all", head_dim: 4, mask: "full", b: null, at: 0, question: null, tour: null, element: null, inputs: null, words: null, sram: 102400 };
const A100_SRAM = 192 * 1024;
const PRESETS = [
  { name: "eight", state: { ...FROM_START, seqlen: 8, a: { algorithm: "flash2", block: "2x2" } } },
  { name: "twelve", state: { ...FROM_START, seqlen: 12, a: { algorithm: "flash1", block: "3x2" } } },
  { name: "softmax", state: { ...FROM_START, queries: "one", seqlen: 4, a: { algorithm: "flash2", block: "1x2" }, element: 2, inputs: "counting" } },
  { name: "six", state: { ...FROM_START, seqlen: 6, a: { algorithm: "standard" } } },
  { name: "a100", state: { ...FROM_START, seqlen: 1024, head_dim: 64, a: { algorithm: "flash1", block: "64x768" }, element: 1, sram: A100_SRAM } },
];

/** Line 1 of FlashAttention's algorithm 1 as it stands, M in elements: it leaves no room for S, m and l. */
function blockRule(sramBytes, elementBytes, seqlen, headDim) {
  const M = Math.floor(sramBytes / elementBytes);
  const bc = Math.ceil(M / (4 * headDim));
  const br = Math.min(bc, headDim);
  return { M, bc, br, tc: Math.ceil(seqlen / bc), tr: Math.ceil(seqlen / br), d: headDim, n: seqlen, bytes: sramBytes, element: elementBytes };
}

class Articles {
  constructor(page) {
    this.page = page;
    this.root = document.querySelector(".articles");
    this.note = this.root.querySelector(".note");
    this.rule = this.root.querySelector(".rule");
    this.sliders = Object.fromEntries(["seqlen", "block_m", "block_n"].map((name) => [name, this.root.querySelector(`[name=${name}]`)]));
    this.element = this.root.querySelector("[name=element]");
    this.buttons = PRESETS.map((preset) => {
      const button = element("button", { type: "button", "data-preset": preset.name, "data-text": `preset_${preset.name}` });
      button.addEventListener("click", () => this.choose(preset));
      return button;
    });
    this.root.querySelector(".presets").append(...this.buttons);
    for (const slider of Object.values(this.sliders)) slider.addEventListener("input", () => this.#resize());
    this.element.addEventListener("change", () => this.#resizeElement(Number(this.element.value)));
  }

  choose({ name, state }) {
    this.page.clock.pause();
    return this.page.change({ ...state, preset: name });
  }

  #resize() {
    const [seqlen, high, wide] = ["seqlen", "block_m", "block_n"].map((name) => Number(this.sliders[name].value));
    const { a, b } = this.page.state;
    const block = `${Math.min(high, seqlen)}x${Math.min(wide, seqlen)}`;
    const resized = (run) => run && (run.algorithm === "standard" ? run : { ...run, block });
    return this.page.change({ seqlen, a: resized(a), b: resized(b), preset: null, at: 0 });
  }

  #resizeElement(bytes) {
    const { state } = this.page;
    if (state.preset !== "a100") return this.page.change({ element: bytes });
    const { br, bc } = blockRule(A100_SRAM, bytes, state.seqlen, state.head_dim);
    return this.page.change({ element: bytes, a: { ...state.a, block: `${br}x${bc}` }, at: 0 });
  }

  /** Called when the state has changed. */
  show({ a }) {
    const { language, state } = this.page;
    const preset = PRESETS.find(({ name }) => name === state.preset);
    if (preset) this.root.open = true;
    this.buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.preset === state.preset)));
    this.note.hidden = !preset;
    if (preset) setText(this.note, language.text(`preset_note_${preset.name}`));
    this.#showSliders(a.recording);
    const isRule = state.preset === "a100";
    this.rule.hidden = !isRule;
    if (!isRule) return;
    const rule = blockRule(A100_SRAM, state.element, state.seqlen, state.head_dim);
    this.rule.dataset.places = JSON.stringify(rule);
    setText(this.rule, language.text("block_rule", rule));
  }

  #showSliders({ algorithm, settings, trace }) {
    const small = trace !== undefined && settings.seqlen <= LONGEST_MADE && settings.queries === "all";
    for (const [name, slider] of Object.entries(this.sliders)) {
      const label = slider.closest("label");
      label.hidden = !small || (name !== "seqlen" && algorithm === "standard");
      slider.min = name === "seqlen" ? SHORTEST_MADE : 1;
      slider.max = name === "seqlen" ? LONGEST_MADE : settings.seqlen;
      slider.value = settings[name] ?? 1;
      setText(label.querySelector("output"), String(settings[name] ?? ""));
    }
    this.element.closest("label").hidden = trace === undefined;
    this.element.value = settings.element ?? 2;
  }
}
