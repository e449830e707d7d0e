// A run to take away: as an SVG that plays by itself, or as a video of the page's stage. Nothing leaves the machine.

const FILM_SECONDS = 12;
const PICTURE = { side: 480, left: 24, top: 48, bottom: 56 };
const VIDEO = { width: 960, height: 640, frames: 240, kinds: ["video/mp4;codecs=avc1.42E01F", "video/mp4", "video/webm;codecs=vp9", "video/webm"] };

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** The run as an animated SVG: cells take the colours of the page's matrix as their events come. */
function svgOf({ trace, grid, recording }, title, colours) {
  const { side, left, top, bottom } = PICTURE;
  const [rows, cols] = [grid.rowEdges.at(-1), grid.colEdges.at(-1)];
  const high = Math.max(Math.min(side, Math.round((side * rows) / cols)), 24);
  const seconds = (event) => ((FILM_SECONDS * (event + 1)) / trace.length).toFixed(3);
  const x = (col) => (left + (side * col) / cols).toFixed(2);
  const y = (row) => (top + (high * row) / rows).toFixed(2);
  const gap = Math.max(grid.width, grid.height) <= 32 ? 1 : 0;
  const parts = [`<rect width="100%" height="100%" fill="${colours.card}"/>`, `<text x="${left}" y="30" font-size="18" fill="${colours.ink}">${escaped(title)}</text>`];
  for (let cell = 0; cell < grid.width * grid.height; cell++) {
    const [i, j] = [Math.floor(cell / grid.width), cell % grid.width];
    const sizes = [x(grid.colEdges[j + 1]) - x(grid.colEdges[j]) - gap, y(grid.rowEdges[i + 1]) - y(grid.rowEdges[i]) - gap].map((size) => Math.max(size, 0.5).toFixed(2));
    const times = { computed: grid.computedAt, skipped: grid.skippedAt, stored: grid.storedAt, weights: grid.weightsStoredAt };
    const sets = Object.entries(times).filter(([, at]) => at[cell] !== NEVER).map(([state, at]) => `<set attributeName="fill" to="${colours[state]}" begin="${seconds(at[cell])}s"/>`);
    parts.push(`<rect x="${x(grid.colEdges[j])}" y="${y(grid.rowEdges[i])}" width="${sizes[0]}" height="${sizes[1]}" fill="${colours.untouched}">${sets.join("")}</rect>`);
  }
  parts.push(...movedBar(trace, top + high + 22, colours), currentTile(trace, { x, y, seconds, colours }));
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${side + 2 * left} ${top + high + bottom}" font-family="system-ui, sans-serif" data-events="${trace.length}" data-algorithm="${recording.algorithm}"><title>${escaped(title)}</title>${parts.join("")}</svg>`;
}

/** Bytes moved so far: a bar that grows, and the total. */
function movedBar(trace, top, colours) {
  const { side, left } = PICTURE;
  const points = Array.from({ length: 61 }, (_, i) => trace.moved[Math.round((i * trace.length) / 60)] / trace.moved[trace.length]);
  const widths = points.map((share) => (share * side).toFixed(1)).join(";");
  return [
    `<rect x="${left}" y="${top - 10}" width="${side}" height="8" fill="${colours.track}"/>`,
    `<rect x="${left}" y="${top - 10}" height="8" width="${side}" fill="${colours.Q}"><animate attributeName="width" values="${widths}" dur="${FILM_SECONDS}s" fill="freeze"/></rect>`,
    `<text x="${left}" y="${top + 18}" font-size="14" fill="${colours.soft}">HBM: ${formatBytes(trace.moved[trace.length])}</text>`,
  ];
}

/** The tile of scores that is worked on, at each of its events. */
function currentTile(trace, { x, y, seconds, colours }) {
  const sets = [];
  let before = "";
  for (let i = 0; i < trace.length; i++) {
    const { array, kind, rows, cols } = trace.forms[trace.form[i]];
    if (array !== "S" || kind !== "compute") continue;
    const place = { x: x(Math.max(trace.col[i], 0)), y: y(trace.row[i]), width: (x(trace.col[i] + cols) - x(trace.col[i])).toFixed(2), height: (y(trace.row[i] + rows) - y(trace.row[i])).toFixed(2) };
    if (JSON.stringify(place) === before) continue;
    before = JSON.stringify(place);
    sets.push(...Object.entries(place).map(([name, value]) => `<set attributeName="${name}" to="${value}" begin="${seconds(i)}s"/>`));
  }
  return `<rect width="0" height="0" fill="none" stroke="${colours.ink}" stroke-width="2">${sets.join("")}<set attributeName="stroke" to="none" begin="${FILM_SECONDS}s"/></rect>`;
}

class Export {
  constructor(page) {
    this.page = page;
    this.said = document.querySelector(".said");
    for (const [id, action] of [["save-svg", () => this.svg()], ["save-video", () => this.video()], ["copy-link", () => this.link()]]) {
      document.querySelector(`#${id}`).addEventListener("click", action);
    }
  }

  /** Called when the state has changed. */
  show() {
    const playable = this.page.runs.a.grid !== null;
    document.querySelector("#save-svg").disabled = !playable;
    document.querySelector("#save-video").disabled = !playable || typeof MediaRecorder === "undefined";
  }

  async link() {
    this.page.clock.pause();
    try {
      await navigator.clipboard.writeText(location.href);
      this.#say("link_copied");
    } catch {
      window.prompt(this.page.language.text("copy_link"), location.href);
    }
  }

  get #title() {
    const { recording } = this.page.runs.a;
    const { seqlen, head_dim, block } = recording.settings;
    return `${this.page.language.text(`algorithm_${recording.algorithm}`)}, N ${seqlen}, d ${head_dim}${block ? `, ${block.replace("x", " × ")}` : ""}`;
  }

  svg() {
    if (!this.page.runs.a.grid) return;
    const { recording } = this.page.runs.a;
    this.#save(new Blob([svgOf(this.page.runs.a, this.#title, this.page.colours)], { type: "image/svg+xml" }), `${recording.algorithm}.svg`);
  }

  /** Plays run A from its beginning and records what its stage shows. */
  async video(frames = VIDEO.frames) {
    const { page } = this;
    if (!page.runs.a.grid || typeof MediaRecorder === "undefined" || this.recording) return;
    this.recording = true;
    page.clock.pause();
    const canvas = element("canvas", { width: VIDEO.width, height: VIDEO.height });
    const context = canvas.getContext("2d");
    const stream = canvas.captureStream(frames / FILM_SECONDS);
    const type = VIDEO.kinds.find((kind) => MediaRecorder.isTypeSupported(kind));
    const recorder = new MediaRecorder(stream, { mimeType: type });
    const pieces = [];
    recorder.ondataavailable = ({ data }) => pieces.push(data);
    const stopped = new Promise((resolve) => (recorder.onstop = resolve));
    const before = page.clock.at;
    this.#say("recording");
    recorder.start();
    for (let frame = 0; frame <= frames; frame++) {
      page.clock.seek(Math.round((frame * page.clock.end) / frames));
      this.#paint(context, page.clock.positionOf(page.runs.a));
      await new Promise((resolve) => setTimeout(resolve, (1000 * FILM_SECONDS) / VIDEO.frames));
    }
    recorder.stop();
    await stopped;
    page.clock.seek(before);
    this.recording = false;
    this.#say("saved_video");
    const blob = new Blob(pieces, { type });
    this.#save(blob, `${page.runs.a.recording.algorithm}.${type.includes("mp4") ? "mp4" : "webm"}`);
  }

  #paint(context, position) {
    const { runs, views, colours } = this.page;
    const { width, height } = VIDEO;
    const picture = views.a.scene.canvas;
    const scale = Math.min((width - 40) / picture.width, (height - 140) / picture.height);
    context.fillStyle = colours.card;
    context.fillRect(0, 0, width, height);
    context.fillStyle = colours.ink;
    context.font = "20px system-ui, sans-serif";
    context.fillText(this.#title, 20, 36);
    context.drawImage(picture, 20, 56, picture.width * scale, picture.height * scale);
    context.fillStyle = colours.soft;
    context.fillText(`HBM: ${formatBytes(runs.a.trace.moved[position])}   ${position} / ${runs.a.trace.length}`, 20, height - 24);
  }

  #save(blob, name) {
    const link = element("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  #say(key) {
    setText(this.said, this.page.language.text(key));
  }
}
