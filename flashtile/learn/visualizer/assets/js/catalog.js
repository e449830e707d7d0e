// Which runs were recorded, and how to choose among them.

const SHARED = ["queries", "seqlen", "head_dim", "mask"]; // the same in both runs of a comparison, in the order of choosing
const OWN = ["block", "num_splits", "page_size"];
const PREFERRED = { num_splits: 8 }; // where nothing is asked for: several splits, as in Flash-Decoding
const OF_MADE = ["element", "inputs", "words"]; // of runs that are made on the page

const SMALL_LENGTH = 8; // one that is offered of those that are made on the page

class Catalog {
  constructor({ recordings, packed, sram_sizes, cards, small_inputs, stories }) {
    this.maker = new Maker(small_inputs);
    this.recordings = recordings;
    this.packed = packed;
    this.sramSizes = sram_sizes;
    this.cards = cards;
    this.stories = stories;
    this.traces = new Map();
  }

  get algorithms() {
    return [...new Set(this.recordings.map((recording) => recording.algorithm))];
  }

  /** The sizes of SRAM for which an algorithm was recorded: all, where its blocks do not depend on it. */
  sramSizesOf(algorithm) {
    const recorded = this.matching({ algorithm }).map(({ settings }) => settings.sram_bytes);
    return recorded.includes(undefined) ? this.sramSizes : this.sramSizes.filter((size) => recorded.includes(size));
  }

  /** Recordings that agree with all of `wanted`. */
  matching(wanted) {
    return this.recordings.filter(({ algorithm, settings }) =>
      Object.entries(wanted).every(([key, value]) => (key === "algorithm" ? algorithm : settings[key]) === value));
  }

  /** Values of `parameter` among recordings. */
  values(recordings, parameter) {
    const values = [...new Set(recordings.map(({ settings }) => settings[parameter]))].filter((v) => v !== undefined);
    return typeof values[0] === "number" ? values.sort((a, b) => a - b) : values;
  }

  /**
   * The recorded run nearest to what is wanted: parameters are settled one after the other, each among the values
   * that the ones before it leave. With it the values that each parameter could have had.
   */
  resolve(wanted, sram) {
    if (this.#isMade(wanted)) return this.#made(wanted, sram);
    let left = this.matching({ algorithm: wanted.algorithm });
    if (left.length === 0) left = this.matching({ algorithm: this.algorithms[0] });
    const size = nearest(sram, this.sramSizesOf(left[0].algorithm));
    left = left.filter(({ settings }) => (settings.sram_bytes ?? size) === size);
    const choices = {};
    for (const parameter of [...SHARED, ...OWN]) {
      const all = this.values(left, parameter);
      if (all.length === 0) continue;
      const fitting = this.values(left.filter((recording) => fits(recording, size)), parameter);
      const value = nearest(wanted[parameter] ?? PREFERRED[parameter], fitting.length ? fitting : all);
      choices[parameter] = all.map((choice) => ({
        value: choice,
        needs: fitting.includes(choice) ? null : leastSram(left, parameter, choice),
      }));
      if (parameter === "seqlen" && this.maker.makes({ ...wanted, seqlen: SMALL_LENGTH }) && all[0] > SMALL_LENGTH) {
        choices.seqlen.unshift({ value: SMALL_LENGTH, needs: null });
      }
      left = left.filter(({ settings }) => settings[parameter] === value);
    }
    return { recording: left[0], choices, sram: size };
  }

  /** Recorded runs go before those that are made here, unless these are of another size of an element. */
  #isMade(wanted) {
    if (!this.maker.makes(wanted)) return false;
    return ELEMENTS.includes(wanted.element) || this.matching(pick(wanted, ["algorithm", "queries", "seqlen", "head_dim"])).length === 0;
  }

  has(wanted) {
    return this.#isMade(wanted) || this.matching(wanted).length > 0;
  }

  #made(wanted, given) {
    const sram = given >= this.sramSizes[0] ? given : this.sramSizes[0];
    const recording = this.maker.recording(wanted, sram);
    const recorded = this.matching({ algorithm: wanted.algorithm });
    const choices = {};
    for (const parameter of SHARED) {
      const values = [...new Set([...this.values(recorded, parameter), recording.settings[parameter]])];
      if (typeof values[0] === "number") values.sort((a, b) => a - b);
      choices[parameter] = values.map((value) => ({ value, needs: null }));
    }
    if (recording.settings.block) choices.block = blocksFor(recording.settings);
    return { recording, choices, sram };
  }

  /** Standard attention for the same problem; undefined where nothing comparable was recorded. */
  standardFor({ algorithm, settings, trace }, sram) {
    const wanted = { algorithm: algorithm.endsWith("_backward") ? "standard_backward" : "standard", ...pick(settings, SHARED) };
    if (trace) return this.maker.recording({ ...wanted, ...pick(settings, OF_MADE) }, sram);
    return this.matching(wanted).find(({ settings }) => settings.sram_bytes === undefined || settings.sram_bytes === sram);
  }

  /** The trace of a recording, unpacked once. */
  trace(recording) {
    if (recording.trace) return recording.trace;
    const key = recording.packed;
    if (!this.traces.has(key)) this.traces.set(key, unpack(this.packed[key]).then((packed) => new Trace(packed)));
    return this.traces.get(key);
  }
}

/** Square blocks for a run that is made here, and its own. */
function blocksFor({ seqlen, queries, block }) {
  const sizes = [1, 2, 3, 4, 8, 16, 32, 64].filter((size) => size <= seqlen && seqlen / size <= 64);
  const blocks = sizes.map((size) => `${queries === "one" ? 1 : size}x${size}`);
  return [...new Set([...blocks, block])].map((value) => ({ value, needs: null }));
}

function fits(recording, sram) {
  return recording.totals.sram_peak <= sram;
}

function leastSram(recordings, parameter, value) {
  const peaks = recordings.filter(({ settings }) => settings[parameter] === value).map((r) => r.totals.sram_peak);
  return Math.min(...peaks);
}

function nearest(wanted, values) {
  if (values.includes(wanted)) return wanted;
  if (typeof wanted !== "number" || typeof values[0] !== "number") return values[0];
  return values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));
}
