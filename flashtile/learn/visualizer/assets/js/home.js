// The landing view: the tours as pictures, and behind "more" the stage, the stories and the questions.

const PICTURE_SIDE = 96;

/** The parts of a picture: [x, y, width, height, colour] of a square, or [path, colour]. */
const tilesOfPicture = (each, gap, colourAt) => Array.from({ length: 36 }, (_, i) => [(i % 6) * each, Math.floor(i / 6) * each, each - gap, each - gap, colourAt(i % 6, Math.floor(i / 6))]);
const CARD_PICTURES = {
  slow: () => [...tilesOfPicture(8, 1, () => "s"), ["M54 22h22v20h-6l8.500 11 8.500-11h-6V16H54z", "line"], [0, 58, 96, 38, "panel"], ...tilesOfPicture(5, 0.5, () => "stored").map(([x, y, w, h, c]) => [x + 6, y + 62, w, h, c]), ...tilesOfPicture(5, 0.5, () => "weights").map(([x, y, w, h, c]) => [x + 44, y + 62, w, h, c]), [82, 62, 8, 30, "o"]],
  tiles: () => [[0, 18, 10, 78, "track"], [0, 44, 10, 26, "q"], [18, 0, 78, 10, "track"], [44, 0, 26, 10, "k"], ...tilesOfPicture(13, 1.5, (x, y) => (x >= 2 && x < 4 && y >= 2 && y < 4 ? "s" : y < 2 || (y < 4 && x < 2) ? "computed" : "untouched")).map(([x, y, w, h, c]) => [x + 18, y + 18, w, h, c])],
  softmax: () => [[0, 62, 18, 34, "track"], [24, 30, 18, 66, "track"], [0, 88, 18, 8, "s"], [24, 78, 18, 18, "s"], [54, 46, 18, 50, "s"], [78, 0, 18, 96, "s"]],
  loops: () => [...tilesOfPicture(7, 1, (x, y) => (x < 2 || (x === 2 && y < 3) ? "s" : "untouched")).map(([x, y, w, h, c]) => [x, y + 20, w, h, c]), ...tilesOfPicture(7, 1, (x, y) => (y < 2 || (y === 2 && x < 3) ? "s" : "untouched")).map(([x, y, w, h, c]) => [x + 54, y + 20, w, h, c]), ["M18 74v10h-5l8 10 8-10h-5V74z", "line"], ["M64 81h14v-5l10 8-10 8v-5H64z", "line"]],
  gradients: () => [...tilesOfPicture(8, 1, (x, y) => (x < 2 && y < 2 ? "s" : "computed")).map(([x, y, w, h, c]) => [x + 24, y + 24, w, h, c]), [0, 24, 10, 48, "q"], [24, 0, 48, 10, "k"], [86, 24, 10, 48, "o"], ["M22 40h-6v-6l-8 9 8 9v-6h6z", "line"], ["M39 22v-5h-6l9-6 9 6h-6v5z", "line"], [24, 82, 48, 10, "v"]],
  turns: () => [0, 1, 2].flatMap((i) => [[i * 32, 4, 10, 16, "v"], [i * 32 + 11, 4, 10, 16, "v"], [i * 32, 28, 15, 16, "q"], [i * 32 + 16, 48, 15, 16, "s"], [i * 32 + 16, 28 + 44, 15, 16, "q"], [i * 32, 28 + 44, 15, 16, "computed"]]),
  eight: () => [...[0, 4, 8, 12, 16, 20, 26, 32, 40, 50, 62, 76, 92].map((x) => [x, 52, 2, 18, "line"]), [0, 70, 96, 3, "line"], ["M10 20a7 7 0 1 0 .1 0z", "s"], ["M47 20a7 7 0 1 0 .1 0z", "s"], ["M74 20a7 7 0 1 0 .1 0z", "o"]],
  split: () => [[0, 12, 96, 14, "track"], ...[0, 1, 2, 3].flatMap((i) => [[i * 24.5, 12, 22.5, 14, ["q", "k", "v", "o"][i]], [i * 24.5, 34, 22.5, 6, "s"], [i * 24.5 + 10, 44, 3, 20, "line"]]), [10, 64, 76.5, 3, "line"], [46.5, 64, 3, 12, "line"], [30, 76, 36, 14, "s"]],
  pages: () => [...[0, 1, 2, 3].map((i) => [0, i * 24.5, 26, 21, i < 2 ? "k" : "v"]), ...[0, 1, 2, 3].map((i) => [70, i * 24.5, 26, 21, i < 2 ? "k" : "o"]), ...[[2, 0], [6, 1]].map(([at]) => [37, at * 12, 22, 20, "k"]), [37, 50, 22, 20, "v"]],
};

class Home {
  constructor(page) {
    this.page = page;
    this.race = new Race(page);
    this.cards = document.querySelector(".cards");
    this.words = document.querySelector(".begin input");
    document.querySelector(".begin").addEventListener("submit", () => this.#begin());
    this.cards.append(...page.tour.offered.map(({ name }) => this.#card(name)));
    const algorithms = page.catalog.algorithms.map((algorithm) => {
      const button = element("button", { type: "button", "data-algorithm": algorithm, "data-text": `algorithm_${algorithm}` });
      button.addEventListener("click", () => page.change({ a: { algorithm }, b: null, at: 0, tour: null, story: null, question: null }).then(() => page.play(1)));
      return button;
    });
    document.querySelector(".home .algorithms").append(...algorithms);
  }

  #card(name) {
    const squares = CARD_PICTURES[name]().map((part) => {
      if (part.length === 2) return svgElement("path", { d: part[0], class: `fill-${part[1]}` });
      const [x, y, width, height, colour] = part;
      return svgElement("rect", { x, y, width, height, class: `fill-${colour}`, rx: 1 });
    });
    const picture = svgElement("svg", { viewBox: `0 0 ${PICTURE_SIDE} ${PICTURE_SIDE}`, "aria-hidden": "true" }, ...squares);
    const button = element("button", { type: "button", "data-tour": name }, picture, element("b", { "data-text": `tour_${name}` }), element("span", { "data-text": `tour_${name}_about` }));
    button.addEventListener("click", () => this.page.tour.begin(name));
    return element("li", {}, button);
  }

  /** The first tour, with the reader's sentence if it was changed. */
  #begin() {
    const { tour, state, language } = this.page;
    const words = this.words.value;
    if (words !== language.text("tour_words") && tokensOf(words).length > 1) state.words = words;
    tour.begin(tour.offered[0].name);
  }

  show() {
    this.page.language.apply(document.querySelector(".home"));
    this.words.value = this.page.tour.said ?? this.page.language.text("tour_words");
    this.race.show();
  }
}
