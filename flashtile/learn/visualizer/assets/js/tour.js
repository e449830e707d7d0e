// "Start here": eight tokens, a step at a time, then a thousand.

const SMALL = { queries: "all", seqlen: 8, head_dim: 4, mask: "full", b: null, sync: "share" };
const SMALL_TILED = { ...SMALL, a: { algorithm: "flash2", block: "4x4" } };
const TOUR = [
  { ...SMALL, a: { algorithm: "standard" }, at: "first_tile" },
  { ...SMALL, a: { algorithm: "standard" }, at: "scores_stored" },
  { ...SMALL, a: { algorithm: "standard" }, at: "end" },
  { ...SMALL_TILED, at: "first_tile" },
  { ...SMALL_TILED, at: "second_tile" },
  { ...SMALL_TILED, at: "end" },
  { ...SMALL, seqlen: 1024, head_dim: 64, a: { algorithm: "flash2", block: "64x64" }, b: { algorithm: "standard" }, sync: "bytes", at: "nearly_done" },
];

class Tour {
  constructor(page) {
    this.page = page;
    this.root = document.querySelector(".tour");
    this.words = this.root.querySelector("p");
    this.back = this.root.querySelector("#tour-back");
    this.next = this.root.querySelector("#tour-next");
    this.begin = document.querySelector("#tour-begin");
    this.begin.hidden = !TOUR.every((state) => page.controls.answerable(state));
    this.begin.addEventListener("click", () => this.go(1));
    this.back.addEventListener("click", () => this.go(this.page.state.tour - 1));
    this.next.addEventListener("click", () => this.go(this.page.state.tour + 1));
    this.root.querySelector("#tour-end").addEventListener("click", () => this.page.change({ tour: null }));
  }

  async go(number) {
    this.page.clock.pause();
    if (number > TOUR.length) return this.page.change({ tour: null });
    await this.page.change({ ...TOUR[number - 1], question: null, tour: number });
    if (number === TOUR.length) this.page.play(0.25);
  }

  /** Called when the state has changed. */
  show(baseline) {
    const { page } = this;
    const number = page.state.tour;
    const open = Number.isInteger(number) && number >= 1 && number <= TOUR.length && !this.begin.hidden;
    this.root.hidden = !open;
    if (!open) return;
    const { a } = page.runs;
    const theirs = baseline.a ? allMoved({ recording: baseline.a }) : 0;
    const places = { moved: formatBytes(allMoved(a)), theirs: formatBytes(theirs), ratio: formatRatio(theirs / allMoved(a)) };
    setText(this.words, page.language.text(`tour_${number}`, places));
    setText(this.root.querySelector("b"), `${number} / ${TOUR.length}`);
    this.back.disabled = number === 1;
  }
}
