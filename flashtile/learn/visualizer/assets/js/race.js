// The race of the landing view: the bytes of two recorded runs, array by array, through memory that is equally fast.

const RACE = { algorithm: "flash2", queries: "all", seqlen: 1024, head_dim: 64, mask: "full", block: "64x64" }; // the run of the tours
const RACERS = { flash2: ["Q K V", "O lse"], standard: ["Q K", "S", "S", "P", "P V", "O"] }; // read and written in turns
const RACE_SECONDS = 7;
const PAUSE_SECONDS = 2;

class Race {
  constructor(page) {
    this.page = page;
    this.root = document.querySelector(".race");
    this.lanes = Object.keys(RACERS).map((algorithm) => this.#lane(algorithm)).filter(Boolean);
    this.root.hidden = this.lanes.length < 2;
    this.most = Math.max(...this.lanes.map(({ bytes }) => bytes));
  }

  #lane(algorithm) {
    const { catalog } = this.page;
    const [flash2] = catalog.matching(RACE);
    const recording = algorithm === "standard" && flash2 ? catalog.standardFor(flash2, DEFAULTS.sram) : flash2;
    if (!recording) return null;
    const stripes = RACERS[algorithm].flatMap((names, i) => names.split(" ").map((name) => ({ name, written: i % 2 === 1, bytes: recording.traffic[name][i % 2] })));
    const bytes = stripes.reduce((sum, stripe) => sum + stripe.bytes, 0);
    const parts = stripes.map(({ name, written, bytes: size }) => element("i", { style: `flex:${size} 0 0;--colour:var(--${name === "lse" ? "statistics" : name.toLowerCase()})`, class: written ? "written" : "" }, element("span", {}, name)));
    const track = element("div", { class: "stripes" }, ...parts);
    const said = element("span", { class: "bytes" });
    this.root.append(element("div", { class: "lane", "data-racer": algorithm }, element("b", { "data-text": `algorithm_${algorithm}` }), said, element("div", { class: "way", "aria-hidden": "true" }, track)));
    return { algorithm, bytes, track, said };
  }

  /** Called when the landing view is shown; whoever wants no motion sees the end. */
  show() {
    if (this.root.hidden) return;
    for (const { bytes, track } of this.lanes) setStyle(track, "width", `${(100 * bytes) / this.most}%`);
    this.start = undefined;
    if (stillness.matches) this.#draw(1);
    else this.request ??= requestAnimationFrame((now) => this.#frame(now));
  }

  #frame(now) {
    this.request = undefined;
    if (document.body.dataset.view !== "home") return;
    this.start ??= now;
    const seconds = ((now - this.start) / 1000) % (RACE_SECONDS + PAUSE_SECONDS);
    this.#draw(Math.min(seconds / RACE_SECONDS, 1));
    this.request = requestAnimationFrame((next) => this.#frame(next));
  }

  /** `share` of the time that the slower one needs. */
  #draw(share) {
    for (const { bytes, track, said } of this.lanes) {
      const moved = Math.min(share * this.most, bytes);
      setStyle(track, "clip-path", `inset(0 ${(100 * (1 - moved / bytes)).toFixed(2)}% 0 0)`);
      setText(said, moved === bytes ? this.page.language.text("race_done", { bytes: formatBytes(bytes) }) : formatBytes(moved));
    }
  }
}
