// The clock: which position each run shows, and how it moves.

const RUN_SECONDS = 30; // a whole run at speed 1
const SLOWEST = 2; // events a second at speed 1

/**
 * One run leads; the other follows at the same share of its events ("share") or when it has moved as many
 * bytes ("bytes"): the latter is a race on memory that is equally fast for both.
 */
class Clock {
  constructor(draw) {
    this.draw = draw;
    this.runs = [];
    this.sync = "share";
    this.at = 0;
    this.playing = false;
    this.speed = 1;
  }

  setRuns(runs, sync) {
    this.runs = runs;
    this.sync = sync;
    this.leader = runs.reduce((best, run) => (this.#length(run.trace) > this.#length(best.trace) ? run : best));
    this.at = Math.min(this.at, this.end);
  }

  #length(trace) {
    return this.sync === "bytes" ? trace.moved[trace.length] : trace.length;
  }

  /** Events a second while it plays. */
  get rate() {
    return this.goal ? (this.goal.to - this.goal.from) / this.goal.seconds : this.speed * Math.max(this.end / RUN_SECONDS, SLOWEST);
  }

  get end() {
    return this.leader.trace.length;
  }

  /** Events of `run` that have happened, with the share of the one that is under way. */
  momentOf(run) {
    const position = this.positionOf(run);
    const { trace } = run;
    if (run === this.leader || position >= trace.length) return run === this.leader ? this.at : position;
    if (this.sync !== "bytes") return Math.max((this.at / this.end) * trace.length, position);
    const led = this.leader.trace.moved;
    const at = Math.floor(this.at);
    const moved = led[at] + (this.at - at) * ((led[at + 1] ?? led[at]) - led[at]);
    const next = trace.moved[position + 1] - trace.moved[position];
    return position + (next > 0 ? Math.min(Math.max((moved - trace.moved[position]) / next, 0), 0.999) : 0);
  }

  positionOf(run) {
    const at = Math.floor(this.at);
    if (run === this.leader) return at;
    const { trace } = run;
    if (at >= this.end) return trace.length;
    if (this.sync === "bytes") return at === 0 ? 0 : countUpTo(trace.moved, this.leader.trace.moved[at]) - 1;
    return Math.floor((at / this.end) * trace.length);
  }

  /** The clock's time at which `run` is at `position`: the first, where it stands still. */
  placeOf(run, position) {
    const { trace } = this.leader;
    if (run === this.leader) return position;
    if (this.sync === "bytes") return Math.max(countUpTo(trace.moved, run.trace.moved[position]) - 1, 0);
    return Math.min(Math.ceil((position / run.trace.length) * trace.length), trace.length);
  }

  seek(at) {
    this.at = Math.min(Math.max(at, 0), this.end);
    this.draw();
  }

  step(direction, byTile) {
    this.pause();
    const at = Math.floor(this.at);
    this.seek(byTile ? this.leader.trace.nextTile(at, direction) : at + direction);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.at >= this.end) this.at = 0;
    this.goal = null;
    this.#begin();
  }

  /** Play up to a moment in so many seconds. */
  playTo(to, seconds) {
    if (to <= this.at) return;
    this.goal = { from: this.at, to, seconds };
    this.#begin();
  }

  #begin() {
    this.playing = true;
    this.before = undefined;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame((now) => this.#advance(now));
    this.draw();
  }

  pause() {
    this.playing = false;
    this.goal = null;
    this.draw();
  }

  #advance(now) {
    if (!this.playing) return;
    const seconds = this.before === undefined ? 0 : Math.min((now - this.before) / 1000, 0.25);
    this.before = now;
    const end = this.goal ? this.goal.to : this.end;
    this.at = Math.min(this.at + seconds * this.rate, end);
    if (this.at >= end) {
      this.pause();
      this.ended?.();
    } else {
      this.draw();
      this.frame = requestAnimationFrame((later) => this.#advance(later));
    }
  }
}
