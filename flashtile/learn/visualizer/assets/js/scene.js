// The stage of a run on a canvas: the score matrix with Q, K, V and O along it, and the chip: SRAM above, HBM below, and
// the tiles that travel between them. Parts that never change are painted once, so a frame paints only what moves.

const [STRIP, THIN_STRIP] = [14, 8]; // pixels across a strip along the matrix
const PAD = 12;
const TITLE = 26; // height of a panel's title
const MAX_GAPS = 64; // tiles a side up to which gaps between them are drawn
const MAX_LINED = 16; // tokens up to which every score is seen
const LEAST_NUMBER = 38; // pixels of a score, for its number
const MIN_SIDE = 16; // of a tile in SRAM
const NARROW = 230; // of the chip, with room for short texts only
const MIN_NOTED = 400; // width of the chip, with room for a note after a title
const MIN_PART = 5; // of an array in HBM
const LEAST_CHIP = 240; // height of the chip, below which SRAM gets more of it
const LEAST_ROOMY = 124; // height of SRAM
const MAX_SHAPE = 1.5; // a tile in SRAM is at most so much wider than high
const WIDE = 1.15; // ratio of width to height from which on the chip is next to the matrix
const MAX_SLOTS = 10; // in a row
const LEAST_LANES = 8; // multiprocessors that are shown for one query
const SLOT_GAP = 8; // pixels between two
const MAX_ARRAYS = 9; // from which on small arrays are left out
const LABEL = 64; // pixels for the bytes of a tile that travels
const [WORD, SHORT_WORD, WORD_LINE] = [72, 44, 18]; // pixels for a word next to its row, on a phone, and above its column
const MAX_TRAVELLERS = 6;
const [NAME_SIZE, NAME_LINE] = [12, 12]; // pixels of an array's name, and to a second line of names
const ORDER = ["Q", "K", "S", "P", "V", "O"];

class SceneView {
  /** `choose(row)` is called when a row of the matrix is clicked. */
  constructor(canvas, language, choose) {
    Object.assign(this, { canvas, language, choose });
    this.context = canvas.getContext("2d");
    this.ground = document.createElement("canvas"); // what never changes
    this.cells = document.createElement("canvas"); // tiles that were computed, skipped or stored
    canvas.addEventListener("click", (event) => this.#click(event));
  }

  /** `compared`: all runs on the page, which share their scales. */
  show(run, sram, compared) {
    Object.assign(this, { run, sram, compared });
    this.window = visibleWindow(run.recording.settings);
    this.resize();
  }

  resize() {
    if (!this.run) return;
    const { clientWidth: width, clientHeight: height } = this.canvas.parentElement;
    this.ratio = Math.min(window.devicePixelRatio || 1, 2);
    Object.assign(this, { width, height, coloured: null });
    for (const canvas of [this.canvas, this.ground, this.cells]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    for (const canvas of [this.canvas, this.ground]) canvas.getContext("2d").setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.#arrange();
  }

  #arrange() {
    const { width, height } = this;
    const { grid, trace } = this.run;
    const hasMap = grid !== null && trace.data.length === 0; // pages have block tables in the place of the matrix
    const wide = width / height > WIDE;
    const [one, other] = wide ? [Math.min(width * (width > MIN_NOTED ? 0.56 : 0.5), height + 2 * PAD), height] : [width, Math.round(height * 0.54)];
    const map = { x: 0, y: 0, width: one, height: other };
    const chip = !hasMap ? { x: 0, y: 0, width, height } : wide ? { x: one, y: 0, width: width - one, height } : { x: 0, y: other, width, height: height - other };
    this.area = hasMap ? this.#arrangeMap(map) : null;
    this.#arrangeChip(chip);
  }

  /** The place of the score matrix, with room for the strips. */
  #arrangeMap({ x, y, width, height }) {
    const { rowEdges, colEdges } = this.run.grid;
    const [rows, cols] = [rowEdges.at(-1), colEdges.at(-1)];
    Object.assign(this, { rows, cols, keysInOrder: this.run.trace.arrays.some((array) => array.name === "K" && array.rows === cols) });
    this.strip = height < LEAST_CHIP ? THIN_STRIP : STRIP;
    this.words = this.run.recording.settings.words?.split(" ");
    const edge = 2 * this.strip + 18;
    const [beside, above] = this.words ? [height < LEAST_CHIP ? SHORT_WORD : WORD, WORD_LINE] : [0, 0];
    const [most, mostHigh] = [width - edge - beside - 2 * PAD, height - TITLE - edge - above - PAD - 10];
    if (rows === 1) return { left: x + PAD + edge, top: y + TITLE + edge, width: most, height: Math.min(96, mostHigh / 4), edge, beside, above, bottom: y + height };
    const side = Math.min(most, mostHigh * (cols / rows));
    return { left: x + PAD + edge + beside + (most - side) / 2, top: y + TITLE + edge + above, width: side, height: side * (rows / cols), edge, beside, above, bottom: y + height };
  }

  #arrangeChip({ x, y, width, height }) {
    const [left, wide] = [x + PAD, width - 2 * PAD];
    const low = height < LEAST_CHIP; // a phone
    const bus = low ? 24 : Math.max(Math.round(height * 0.13), 38);
    const high = Math.round((height - bus - PAD) * (low ? 0.56 : 0.5));
    this.onChip = { left, top: y + PAD / 2, width: wide, height: high };
    this.bus = { left, top: y + PAD / 2 + high, width: wide, height: bus };
    this.memory = { left, top: this.bus.top + bus, width: wide, height: height - high - bus - PAD };
    this.#arrangeSlots();
    this.#arrangeArrays();
  }

  /** A place for each tile that SRAM ever holds. Areas are as bytes, in the runs that are compared alike. */
  #arrangeSlots() {
    const { left, top, width, height } = this.onChip;
    this.roomy = height >= LEAST_ROOMY; // for names and programs under the tiles
    const room = { left: left + PAD, top: top + TITLE + 14, width: width - 2 * PAD, height: height - TITLE - (this.roomy ? 58 : 18) };
    const every = this.compared.map(({ trace }) => largestTiles(trace));
    const mine = largestTiles(this.run.trace);
    const most = Math.max(...this.compared.map(({ trace }) => trace.sramPeak[trace.length]), 1);
    let each = (0.8 * room.width * room.height) / most; // square pixels of a byte
    while (each > 1e-6 && !every.every((tiles) => rowsOfSlots(tiles, each, room.width).every(({ width: wide }) => wide <= room.width) && heightOfRows(tiles, each, room.width) <= room.height)) each *= 0.9;
    const rows = rowsOfSlots(mine, each, room.width);
    const all = heightOfRows(mine, each, room.width);
    let y = room.top + Math.max((room.height - all) / 2, 0);
    this.slots = new Map();
    for (const { slots, width: wide, height: high } of rows) {
      const free = Math.min(Math.max((room.width - wide) / Math.max(slots.length - 1, 1), 0), 18);
      let x = room.left;
      for (const slot of slots) {
        this.slots.set(slot.name, { left: x, top: y + (high - slot.height) / 2, width: slot.width, height: slot.height });
        x += slot.width + SLOT_GAP + free;
      }
      y += high + SLOT_GAP;
    }
    this.names = this.roomy && rows.length === 1 ? room.top + room.height + 14 : null; // under the tiles
  }

  /** A place for each array that HBM ever holds, with rows and columns at one scale. */
  #arrangeArrays() {
    const { left, top, width, height } = this.memory;
    const room = { left: left + PAD, top: top + TITLE + 4, width: width - 2 * PAD, height: height - TITLE - 4 - 24 };
    const arrays = new Map();
    for (const { trace } of this.compared) for (const { name, rows, cols } of trace.arrays) if (!arrays.has(name)) arrays.set(name, { rows, cols, absent: true });
    for (const { name } of this.run.trace.arrays) arrays.get(name).absent = false;
    const { grid } = this.run;
    if (grid && this.rows > 1 && this.area) for (const name of ["S", "P"]) if (!arrays.has(name)) arrays.set(name, { rows: this.rows, cols: this.cols, absent: true });
    const rank = ([name]) => (ORDER.indexOf(arrayOf(name)) + 1 || 9) + ("SP".includes(name) ? 20 : 0);
    const largest = Math.max(...[...arrays.values()].map(({ rows, cols }) => rows * cols));
    const isShown = ([name, { absent, rows, cols }]) => (!absent || "SP".includes(name)) && (arrays.size <= MAX_ARRAYS || rows * cols * 100 > largest);
    const sorted = [...arrays].filter(isShown).sort((a, b) => rank(a) - rank(b));
    const gap = Math.min(18, (0.3 * room.width) / Math.max(sorted.length, 1));
    this.between = gap;
    const widthOf = (cols, scale) => Math.max(cols * scale, MIN_PART);
    const widest = (scale) => sorted.reduce((sum, [, { cols }]) => sum + widthOf(cols, scale) + gap, -gap);
    let scale = room.height / Math.max(...sorted.map(([, { rows }]) => rows), 1);
    while (widest(scale) > room.width && scale > 1e-4) scale *= 0.95;
    this.context.font = `${NAME_SIZE}px ${FONT}`;
    const isNarrow = ([name, { cols }]) => this.context.measureText(prettyName(name)).width > widthOf(cols, scale) + gap - 2;
    this.staggered = room.height > 2 * NAME_LINE && sorted.some(isNarrow);
    if (this.staggered) scale = Math.min(scale, (room.height - NAME_LINE) / Math.max(...sorted.map(([, { rows }]) => rows), 1));
    let at = room.left;
    this.places = new Map(sorted.map(([name, { rows, cols, absent }]) => {
      const place = { left: at, top: room.top, width: Math.max(cols * scale, MIN_PART), height: Math.max(rows * scale, MIN_PART), rows, cols, absent };
      at += place.width + gap;
      return [name, place];
    }));
    const highest = Math.max(...[...this.places.values()].map((place) => place.height), 0);
    const spare = Math.max((room.height - (this.staggered ? NAME_LINE : 0) - highest) / 2, 0);
    for (const place of this.places.values()) place.top += spare;
    this.labels = room.top + spare + highest + 15;
  }

  /** `at` events have happened: with a fraction, the next one is under way. */
  draw(at, tiles, colours, row, moves) {
    if (!this.run || !this.width || !this.height) return;
    const { context } = this;
    const position = Math.floor(at);
    if (this.coloured !== colours || this.spoken !== this.language.name) this.#paintGround(colours);
    this.#paintCells(position, colours);
    context.drawImage(this.ground, 0, 0, this.width, this.height);
    context.drawImage(this.cells, 0, 0, this.width, this.height);
    if (this.area) this.#drawMap(position, tiles, colours, row);
    this.#drawChip(position, tiles, colours);
    this.#drawMoves(at, colours, moves);
  }

  #x(col) {
    return this.area.left + (col / this.cols) * this.area.width;
  }

  #y(row) {
    return this.area.top + (row / this.rows) * this.area.height;
  }

  // What never changes ------------------------------------------------------------------------------------------------

  #paintGround(colours) {
    Object.assign(this, { coloured: colours, spoken: this.language.name });
    const painter = this.ground.getContext("2d");
    painter.fillStyle = colours.card; // opaque, so that drawing it clears the frame before
    painter.fillRect(0, 0, this.width, this.height);
    this.write = (text, x, y, { colour = colours.soft, size = 13, bold = false, align = "left", on = painter } = {}) => {
      on.font = `${bold ? "600 " : ""}${size}px ${this.language.name === "zh" ? FONT_ZH : FONT}`;
      on.fillStyle = colour;
      on.textAlign = align;
      on.fillText(text, x, y);
    };
    if (this.area) this.#paintMapGround(painter, colours);
    this.#paintChipGround(painter, colours);
    const { grid } = this.run;
    this.states = grid && new Array(grid.height * grid.width);
    this.cellsOf = {};
    this.cells.getContext("2d").clearRect(0, 0, this.cells.width, this.cells.height);
    if (!grid) return;
    this.gap = Math.max(grid.width, grid.height) <= MAX_GAPS ? 1 : 0;
    const pixels = (edges, start, size, all) => edges.map((edge) => Math.round((start + (edge / all) * size) * this.ratio));
    const [rows, cols] = [grid.rowEdges.at(-1), grid.colEdges.at(-1)];
    const spots = (left, top, width, height) => ({ x: pixels(grid.colEdges, left, width, cols), y: pixels(grid.rowEdges, top, height, rows) });
    this.cellsOf = { map: this.area && spots(this.area.left, this.area.top, this.area.width, this.area.height) };
    for (const name of ["S", "P"]) {
      const place = this.places.get(name);
      if (place && !place.absent) this.cellsOf[name] = spots(place.left, place.top, place.width, place.height);
    }
  }

  #paintMapGround(painter, colours) {
    const { left, top, width, height, edge, beside, above } = this.area;
    const { language } = this;
    const title = language.text(this.rows > 1 ? "scene_scores" : "scene_scores_row", { rows: this.rows, cols: this.cols });
    painter.font = `600 15px ${FONT}`;
    const fits = painter.measureText(title).width <= width + edge + beside;
    this.write(fits ? title : "S = Q Kᵀ", left - edge - beside, top - edge - above - 8, { colour: colours.ink, size: 15, bold: true });
    painter.fillStyle = colours.untouched;
    painter.fillRect(left, top, width, height);
    painter.fillStyle = colours.track;
    for (const [name, offset] of [["O", 0], ["Q", this.strip + 4]]) {
      const x = left - edge + 14 + offset;
      painter.fillStyle = colours.track;
      painter.fillRect(x, top, this.strip, height);
      this.write(name, x + this.strip / 2, top + height + 15, { colour: colours[name], bold: true, align: "center" });
    }
    if (this.keysInOrder) {
      for (const [name, offset] of [["V", 0], ["K", this.strip + 4]]) {
        painter.fillStyle = colours.track;
        painter.fillRect(left, top - edge + 14 + offset, width, this.strip);
        this.write(name, left - 8, top - edge + 14 + offset + this.strip - (this.strip < STRIP ? 0 : 2), { colour: colours[name], bold: true, align: "right", size: this.strip < STRIP ? 11 : 13 });
      }
    }
    this.strips = { V: top - edge + 14, K: top - edge + this.strip + 18, O: left - edge + 14, Q: left - edge + this.strip + 18 };
    this.#writeWords(painter);
    this.#shapeMask();
    this.#shapeLines();
  }

  /** A sentence along both sides of its scores, where there is room. */
  #writeWords(painter) {
    const { left, top, width, height, edge, beside } = this.area;
    const [high, wide] = [height / this.rows, width / this.cols];
    const [size, least] = [13, 12];
    painter.font = `${size}px ${FONT}`;
    const within = (word, room) => {
      const letters = [...word];
      while (letters.length > 1 && painter.measureText(letters.join("")).width > room) letters.splice(-2, 2, "…");
      return letters.join("");
    };
    this.words?.forEach((word, i) => {
      if (high >= least) this.write(within(word, beside - 4), left - edge + 8, this.#y(i + 0.5) + 5, { size, align: "right" });
      if (wide >= 2 * size) this.write(within(word, wide - 4), this.#x(i + 0.5), top - edge + 8, { size, align: "center" });
    });
  }

  /** Lines between scores where these are few, and between tiles. */
  #shapeLines() {
    const { grid } = this.run;
    this.few = this.cols <= MAX_LINED && this.rows <= MAX_LINED;
    this.lines = new Path2D();
    if (!this.few) return;
    const { left, top, width, height } = this.area;
    for (let col = 0; col <= this.cols; col++) this.lines.rect(this.#x(col), top, 0, height);
    for (let row = 0; row <= this.rows; row++) this.lines.rect(left, this.#y(row), width, 0);
    for (const edge of grid.colEdges) this.lines.rect(this.#x(edge) - 1, top, 2, height);
    for (const edge of grid.rowEdges) this.lines.rect(left, this.#y(edge) - 1, width, 2);
  }

  #shapeMask() {
    this.shaded = this.window.left >= 0 || this.window.right >= 0;
    if (!this.shaded) return;
    const { left: back, right: ahead } = this.window;
    const { rows, cols } = this;
    const offset = cols - rows;
    this.shade = new Path2D();
    const add = (corners) => {
      const [first, ...others] = corners.map(([row, col]) => [this.#x(Math.min(Math.max(col, 0), cols)), this.#y(row)]);
      this.shade.moveTo(...first);
      for (const corner of others) this.shade.lineTo(...corner);
      this.shade.closePath();
    };
    if (ahead >= 0) add([[0, offset + ahead + 1], [Math.max(cols - offset - ahead - 1, 0), cols], [0, cols]]);
    if (back >= 0) add([[Math.min(back - offset, rows), 0], [rows, rows + offset - back], [rows, 0]]);
  }

  #paintChipGround(painter, colours) {
    const { onChip, memory, language } = this;
    for (const [box, key, note] of [[onChip, "scene_sram", "scene_sram_note"], [memory, "scene_hbm", "scene_hbm_note"]]) {
      painter.fillStyle = colours.panel;
      painter.beginPath();
      painter.roundRect(box.left, box.top, box.width, box.height, 8);
      painter.fill();
      painter.strokeStyle = box === onChip ? colours.accent : colours.line;
      painter.lineWidth = box === onChip ? 1.5 : 1;
      painter.stroke();
      this.write(language.text(key), box.left + PAD, box.top + 19, { colour: colours.ink, size: 15, bold: true });
      const name = painter.measureText(language.text(key)).width;
      if (box.width > MIN_NOTED) this.write(language.text(note), box.left + PAD + name + 8, box.top + 19);
    }
    painter.fillStyle = colours.track;
    painter.fillRect(onChip.left + PAD, onChip.top + TITLE + 2, onChip.width - 2 * PAD, 5);
    for (const [name, slot] of this.slots) {
      painter.strokeStyle = colours.line;
      painter.setLineDash([3, 3]);
      painter.strokeRect(slot.left + 0.5, slot.top + 0.5, slot.width - 1, slot.height - 1);
      painter.setLineDash([]);
      if (this.names && painter.measureText(prettyName(name)).width < slot.width + SLOT_GAP) this.write(prettyName(name), slot.left + slot.width / 2, this.names, { align: "center", size: NAME_SIZE });
    }
    for (const [name, place] of this.places) this.#paintPlace(painter, colours, name, place);
  }

  #paintPlace(painter, colours, name, place) {
    if (place.absent) {
      painter.strokeStyle = colours.soft;
      painter.setLineDash([4, 4]);
      painter.strokeRect(place.left + 0.5, place.top + 0.5, place.width - 1, place.height - 1);
      painter.setLineDash([]);
      if (place.width > 46 && place.height > 40) this.#writeWithin(this.language.text("scene_never"), place);
    }
    painter.font = `${NAME_SIZE}px ${FONT}`;
    if (!this.staggered && painter.measureText(prettyName(name)).width > place.width + this.between - 2) return;
    const line = this.staggered && [...this.places.keys()].indexOf(name) % 2;
    this.write(prettyName(name), place.left + place.width / 2, this.labels + (line ? NAME_LINE : 0), { align: "center", size: NAME_SIZE });
  }

  /** A few words in the middle of a place, on as many lines as they need. */
  #writeWithin(words, { left, top, width, height }) {
    const painter = this.ground.getContext("2d");
    painter.font = `12px ${FONT}`;
    const lines = painter.measureText(words).width < width - 8 ? [words] : words.split(" ");
    lines.forEach((line, i) => this.write(line, left + width / 2, top + height / 2 + 4 + 16 * (i - (lines.length - 1) / 2), { align: "center", size: 12 }));
  }

  // What was computed, skipped, stored --------------------------------------------------------------------------------

  /** Only tiles that have changed are painted. */
  #paintCells(position, colours) {
    const { grid } = this.run;
    if (!grid) return;
    const paths = new Map();
    const painter = this.cells.getContext("2d");
    const add = (colour, spot, x, y, gap) => {
      const path = paths.get(colour) ?? new Path2D();
      paths.set(colour, path);
      path.rect(spot.x[x], spot.y[y], Math.max(spot.x[x + 1] - spot.x[x] - gap, 1), Math.max(spot.y[y + 1] - spot.y[y] - gap, 1));
    };
    for (let y = 0, cell = 0; y < grid.height; y++) {
      for (let x = 0; x < grid.width; x++, cell++) {
        const state = grid.stateOf(cell, position);
        if (state === this.states[cell]) continue;
        this.states[cell] = state;
        if (this.cellsOf.map) add(state, this.cellsOf.map, x, y, this.gap);
        if (this.cellsOf.S) add(grid.storedAt[cell] < position ? "stored" : "track", this.cellsOf.S, x, y, 0);
        if (this.cellsOf.P) add(grid.weightsStoredAt[cell] < position ? "weights" : "track", this.cellsOf.P, x, y, 0);
      }
    }
    for (const [state, path] of paths) {
      painter.fillStyle = colours[state];
      painter.fill(path);
    }
  }

  // What moves --------------------------------------------------------------------------------------------------------

  #drawMap(position, tiles, colours, row) {
    const { context } = this;
    if (this.shaded) {
      context.fillStyle = colours.hidden;
      context.fill(this.shade);
    }
    for (const [name, at] of Object.entries(this.strips)) {
      const across = name === "K" || name === "V";
      if (across && !this.keysInOrder) continue;
      context.fillStyle = colours[name];
      for (const tile of tilesOf(tiles, name)) {
        if (across) context.fillRect(this.#x(tile.row), at, Math.max(this.#x(tile.row + tile.rows) - this.#x(tile.row), 2), this.strip);
        else context.fillRect(at, this.#y(tile.row), this.strip, Math.max(this.#y(tile.row + tile.rows) - this.#y(tile.row), 2));
      }
    }
    if (this.rows > 1 && row !== undefined) this.#drawRow(row, colours);
    if (this.rows === 1) this.#drawSplits(position, colours);
    if (this.few) {
      context.strokeStyle = colours.card;
      context.lineWidth = 1;
      context.stroke(this.lines);
    }
    for (const name of ["S", "P"]) for (const tile of tilesOf(tiles, name)) this.#drawTile(name, tile, position, colours);
  }

  #drawRow(row, colours) {
    const { context, area } = this;
    const y = this.#y(row + 0.5);
    context.strokeStyle = colours.accent;
    context.lineWidth = 1;
    context.strokeRect(area.left - area.edge + 10, y, area.width + area.edge - 10, 0);
  }

  /** A tile of scores that SRAM holds. */
  #drawTile(name, tile, position, colours) {
    const [left, top] = [this.#x(Math.max(tile.col, 0)), this.#y(tile.row)];
    const width = Math.max(this.#x(Math.max(tile.col, 0) + tile.cols) - left, 3);
    const height = Math.max(this.#y(tile.row + tile.rows) - top, 3);
    if (!tile.empty) {
      this.context.fillStyle = colours.S;
      this.context.fillRect(left, top, width, height);
    }
    this.context.strokeStyle = colours.ink;
    this.context.lineWidth = 1.5;
    this.context.strokeRect(left, top, width, height);
    if (this.few && !tile.empty && this.run.trace.numbers && width / tile.cols >= LEAST_NUMBER && height / tile.rows >= 20) this.#writeNumbers(name, tile, position, colours);
  }

  /** The scores or weights themselves, in runs that have them. */
  #writeNumbers(name, tile, position, colours) {
    const { trace } = this.run;
    let i = position - 1;
    while (i >= 0 && !(trace.numbers[i] && HOLDS.has(trace.forms[trace.form[i]].kind) && trace.forms[trace.form[i]].name === name)) i--;
    trace.numbers[i]?.forEach((line, y) => line.forEach((value, x) => {
      const text = Number.isFinite(value) ? value.toFixed(2).replace("-", "−") : formatStatistic(value);
      this.write(text, this.#x(tile.col + x + 0.5), this.#y(tile.row + y + 0.5) + 5, { colour: colours.onTile, align: "center", size: 13, on: this.context });
    }));
  }

  /** One query: a lane for each multiprocessor below the row, with its program or idle, as they could run at the same time. */
  #drawSplits(position, colours) {
    const { context, area } = this;
    const { grid, kernels } = this.run;
    const kernel = kernels.find(({ name }) => name === "split" || name === "attention");
    if (!kernel) return;
    const lanes = Math.max(kernel.programs.length, LEAST_LANES);
    const top = area.top + area.height + 24;
    const high = Math.min(56, (area.bottom - top - PAD) / lanes);
    if (high < 3) return;
    this.write(this.language.text("scene_lanes"), area.left + PAD, top - 9, { on: context });
    const gap = high > 12 ? 6 : 2;
    context.fillStyle = colours.track;
    for (let lane = 0; lane < lanes; lane++) context.fillRect(area.left, top + lane * high, area.width, high - gap);
    const span = new Map();
    for (let x = 0; x < grid.width; x++) {
      const number = grid.programs[x];
      const known = span.get(number);
      span.set(number, [known ? known[0] : grid.colEdges[x], grid.colEdges[x + 1]]);
    }
    kernel.programs.forEach((program, number) => {
      const [start, end] = span.get(number) ?? [0, this.cols];
      const done = Math.min(Math.max((position - program.first) / Math.max(program.end - program.first, 1), 0), 1);
      const [left, width] = [this.#x(start), this.#x(end) - this.#x(start)];
      context.fillStyle = colours.accent;
      context.fillRect(left, top + number * high, (width - 1) * done, high - gap);
    });
  }

  #drawChip(position, tiles, colours) {
    const { context, onChip, run } = this;
    const event = position > 0 ? run.trace.event(position - 1) : null;
    const used = run.trace.sramUsed[position];
    context.fillStyle = colours.accent;
    context.fillRect(onChip.left + PAD, onChip.top + TITLE + 2, (onChip.width - 2 * PAD) * Math.min(used / this.sram, 1), 5);
    const text = onChip.width < NARROW ? formatBytes(used) : this.language.text("scene_used", { used: formatBytes(used), all: formatBytes(this.sram) });
    this.write(text, onChip.left + onChip.width - PAD, onChip.top + 19, { align: "right", colour: colours.ink, on: context });
    for (const [name, tile] of tiles) this.#drawHeld(name, tile, position, event, colours);
    if (event?.kind === "compute" && event.op && onChip.width >= NARROW) this.write(prettyOp(event.op), this.bus.left + PAD, this.bus.top + this.bus.height / 2 + 4, { colour: colours.ink, size: 14, bold: true, on: context });
    this.#drawPrograms(event, colours);
    const present = new Set(run.trace.arraysAt(position).map(({ name }) => name));
    for (const [name, place] of this.places) {
      const ofCells = name in this.cellsOf;
      if (place.absent || present.has(name) === ofCells) continue; // cells of S and P are painted, and covered while they are not there
      context.fillStyle = ofCells ? colours.panel : colours.track;
      context.fillRect(place.left, place.top, place.width, place.height);
      if (ofCells) continue;
      context.fillStyle = colours[colourKey(name)];
      context.fillRect(place.left, place.top, place.width, place.height * this.#filled(name, position));
    }
  }

  /** The share of an array in HBM that has numbers: inputs have all of theirs, results what was written. */
  #filled(name, position) {
    const { trace } = this.run;
    if (trace.forms.some((form) => form.kind === "place" && form.name === name)) return 1;
    const { bytes } = trace.arrays.find((array) => array.name === name);
    return Math.min(trace.trafficAt(name, position).written / bytes, 1);
  }

  /** What a tile holds: weights take the place of their scores. */
  #contentOf(name, position) {
    const { trace } = this.run;
    for (let i = position - 1; i >= 0; i--) {
      const { kind, name: of, op } = trace.forms[trace.form[i]];
      if (of === name && kind === "compute" && op) return name === "S" && op.startsWith("P =") ? "P" : name;
    }
    return name;
  }

  #drawHeld(name, tile, position, event, colours) {
    const slot = this.slots.get(name);
    if (!slot) return;
    const { context } = this;
    const share = Math.min(tile.bytes / largestTiles(this.run.trace).get(name).bytes, 1);
    const height = Math.max(slot.height * share, Math.min(slot.height, 6));
    context.fillStyle = colours[colourKey(name)];
    context.fillRect(slot.left, slot.top + slot.height - height, slot.width, height);
    context.font = `600 12px ${FONT}`;
    const content = this.#contentOf(name, position);
    if ((!this.names || content !== name) && context.measureText(content).width <= slot.width - 2) this.write(content, slot.left + slot.width / 2, slot.top + slot.height - height / 2 + 4, { colour: colours.onTile, bold: true, size: 12, align: "center", on: context });
    if (event?.kind === "compute" && event.name === name && event.op) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(slot.left - 2, slot.top + slot.height - height - 2, slot.width + 4, height + 4);
    }
  }

  /** The programs of the kernel that runs: done, at work, to come. */
  #drawPrograms(event, colours) {
    const { context, onChip, run } = this;
    const kernel = event && run.kernels.find(({ name }) => name === event.kernel);
    if (!kernel || !this.roomy || run.trace.data.length > 0) return;
    const { programs } = kernel;
    const text = this.language.text("scene_program", { number: event.program + 1, count: programs.length });
    const y = onChip.top + onChip.height - 8;
    this.write(text, onChip.left + PAD, y, { size: 12, on: context });
    const left = onChip.left + PAD + 130;
    const width = onChip.left + onChip.width - PAD - left;
    if (width < 40) return;
    context.fillStyle = colours.track;
    context.fillRect(left, y - 9, width, 9);
    context.fillStyle = colours.soft;
    context.fillRect(left, y - 9, (width * event.program) / programs.length, 9);
    context.fillStyle = colours.accent;
    context.fillRect(left + (width * event.program) / programs.length, y - 9, Math.max(width / programs.length, 2), 9);
  }

  /** Tiles between HBM and SRAM: under way while the run plays; at rest a line shows where the last one went. */
  #drawMoves(at, colours, { playing, rate }) {
    const { trace } = this.run;
    const { memory, context } = this;
    const position = Math.floor(at);
    const [read, written] = [trace.read[position], trace.written[position]];
    const moved = memory.width < NARROW ? formatBytes(read + written) : `↑ ${formatBytes(read)}   ↓ ${formatBytes(written)}`;
    const still = !playing || stillness.matches;
    const span = still ? 1 : Math.min(Math.max(rate * 0.4, 1), MAX_TRAVELLERS);
    const first = still ? position - 1 : Math.ceil(at - span);
    for (let i = Math.max(first, 0); i <= (still ? position - 1 : position) && i < trace.length; i++) {
      const form = trace.forms[trace.form[i]];
      if (form.kind !== "load" && form.kind !== "store") continue;
      const share = still ? 0.5 : Math.min(Math.max((at - i) / span, 0), 1);
      this.#drawMove(form, trace.row[i], share, still, colours);
    }
    this.write(moved, memory.left + memory.width - PAD, memory.top + 19, { colour: colours.ink, align: "right", on: context });
  }

  #drawMove(form, row, share, still, colours) {
    const { context } = this;
    const place = this.places.get(form.name) ?? this.places.get(form.array);
    if (!place) return;
    const high = Math.max((place.height * form.rows) / place.rows, 4);
    const piece = { x: place.left + place.width / 2, y: place.top + (place.height - high) * (row / Math.max(place.rows - form.rows, 1)) + high / 2, width: place.width, height: high };
    const slot = this.slots.get(form.name) ?? [...this.slots].find(([name]) => arrayOf(name) === form.array)?.[1];
    const target = slot ? { x: slot.left + slot.width / 2, y: slot.top + slot.height / 2, width: slot.width, height: slot.height } : { x: piece.x, y: this.onChip.top + this.onChip.height - 40, width: 16, height: 16 };
    const [from, to] = form.kind === "load" ? [piece, target] : [target, piece];
    const eased = share * share * (3 - 2 * share);
    const between = (key) => from[key] + (to[key] - from[key]) * eased;
    const colour = colours[colourKey(form.array)];
    if (still) {
      context.strokeStyle = colour;
      context.lineWidth = 2;
      const [above, below] = [this.bus.top + 1, this.bus.top + this.bus.height - 1]; // over no name
      const at = (y) => from.x + ((to.x - from.x) * (y - from.y)) / (to.y - from.y || 1);
      context.beginPath();
      context.moveTo(at(above), above);
      context.lineTo(at(below), below);
      context.stroke();
      context.strokeStyle = colours.ink;
      context.strokeRect(piece.x - piece.width / 2 - 1, piece.y - piece.height / 2 - 1, piece.width + 2, piece.height + 2);
    }
    const [width, height] = [Math.min(between("width"), 46), Math.min(between("height"), 46)];
    context.fillStyle = colour;
    const middle = this.bus.top + this.bus.height / 2;
    const y = still ? middle : between("y");
    const x = still ? from.x + ((to.x - from.x) * (middle - from.y)) / (to.y - from.y || 1) : between("x");
    const [w, h] = still ? [Math.max(Math.min(width, 22), 10), Math.max(Math.min(height, 22), 10)] : [Math.max(width, 6), Math.max(height, 6)];
    context.fillRect(x - w / 2, y - h / 2, w, h);
    const atEdge = x + w / 2 + LABEL > this.width;
    this.write(formatBytes(form.bytes), atEdge ? x - w / 2 - 6 : x + w / 2 + 6, y + 4, { colour: colours.ink, bold: true, align: atEdge ? "right" : "left", on: context });
  }

  #click(event) {
    if (!this.area || this.rows === 1) return;
    const y = event.offsetY - this.area.top;
    if (y < 0 || y >= this.area.height) return;
    this.choose(Math.floor((y / this.area.height) * this.rows));
  }
}

const FONT = "system-ui, sans-serif";
const FONT_ZH = 'system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif';
const stillness = window.matchMedia("(prefers-reduced-motion: reduce)");

/** The largest tile of each name that SRAM ever holds, in the order of the formula S = Q Kᵀ, O = P V. */
function largestTiles(trace) {
  if (trace.largest) return trace.largest;
  const found = new Map();
  for (const { kind, name, bytes, rows, cols } of trace.forms) {
    if (!HOLDS.has(kind) || bytes <= (found.get(name)?.bytes ?? 0)) continue;
    found.set(name, { bytes, rows: Math.max(rows, 1), cols: Math.max(cols, 1) || 1 });
  }
  for (const [, tile] of found) if (tile.cols === 1) tile.cols = Math.max(Math.round(tile.bytes / 2 / tile.rows), 1);
  const rank = ([name]) => (ORDER.indexOf(arrayOf(name)) + 1 || 9);
  return (trace.largest = new Map([...found].sort((a, b) => rank(a) - rank(b))));
}

/** The tiles that SRAM ever holds as rows of places: [{slots: [{name, width, height}], width, height}]. */
function rowsOfSlots(tiles, each, room) {
  const slots = [...tiles].map(([name, { bytes, rows, cols }]) => {
    const shape = Math.min(Math.max(cols / rows, 1 / MAX_SHAPE), MAX_SHAPE);
    const width = Math.max(Math.sqrt(bytes * each * shape), MIN_SIDE);
    return { name, width, height: Math.max((bytes * each) / width, MIN_SIDE) };
  });
  const count = Math.ceil(slots.length / Math.min(MAX_SLOTS, Math.floor((room + SLOT_GAP) / (MIN_SIDE + SLOT_GAP))));
  const long = Math.ceil(slots.length / count);
  return Array.from({ length: count }, (_, i) => slots.slice(i * long, (i + 1) * long)).map((row) => ({
    slots: row, width: row.reduce((sum, slot) => sum + slot.width + SLOT_GAP, -SLOT_GAP), height: Math.max(...row.map((slot) => slot.height)),
  }));
}

function heightOfRows(tiles, each, room) {
  return rowsOfSlots(tiles, each, room).reduce((sum, { height }) => sum + height + SLOT_GAP, -SLOT_GAP);
}

function prettyName(name) {
  return name.replace("_ij", "ᵢⱼ").replace("_s", "ₛ");
}

function prettyOp(op) {
  return op.replaceAll("^T", "ᵀ").replaceAll("m'", "m′").replaceAll(" - ", " − ");
}

/** Sides of the window of a recording's mask, -1 without a limit. */
function visibleWindow(settings) {
  const [left, right] = settings.window_size ?? [-1, -1];
  return { left, right: settings.mask === "causal" ? 0 : right };
}

/** The tiles of an array that SRAM holds and whose place is known. */
function tilesOf(tiles, array) {
  return [...tiles].filter(([name, tile]) => arrayOf(name) === array && tile.row >= 0).map(([, tile]) => tile);
}
