// What storing Q and K in eight bits does to each of their numbers, block by block.

STORY_VIEWS.fp8 = class {
  static counters = [];

  constructor({ root, trace, facts }) {
    Object.assign(this, { trace, facts });
    this.parts = ["Q", "K"].map((array) => {
      const { classes } = facts[array];
      const [rows, cols] = [classes.length, classes[0].length];
      return { array, classes, grid: new CellGrid(array, rows, cols, 6), loaded: new FirstTouch(trace, array, ["load"], rows, cols) };
    });
    root.classList.add("in-a-row");
    root.append(...this.parts.map(({ grid }) => grid.root));
  }

  draw(position) {
    const tiles = this.trace.tilesAt(position);
    for (const { array, classes, grid, loaded } of this.parts) {
      grid.paint((row, col) => (loaded.before(position, row, col) ? ["fine", "coarse", "lost", "loud"][classes[row][col]] : "untouched"));
      grid.mark(tiles.get(array));
    }
  }

  numbers(position) {
    const count = (digit) => this.parts.reduce((sum, { classes, loaded }) =>
      sum + classes.reduce((all, row, y) => all + [...row].filter((one, x) => one === digit && loaded.before(position, y, x)).length, 0), 0);
    const { Q, K, error } = this.facts;
    return {
      scales: [Q.scales.length + K.scales.length, String],
      coarse: [count("1"), String],
      lost: [count("2"), String],
      loud: [count("3"), String],
      error: position < this.trace.length ? ["–", String] : [error, (share) => `${threeDigits(100 * share)} %`],
    };
  }
};
