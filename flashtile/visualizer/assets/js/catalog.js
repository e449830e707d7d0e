// Which runs were recorded, and how to choose among them.

const SHARED = ["queries", "seqlen", "head_dim", "mask"]; // the same in both runs of a comparison, in the order of choosing
const OWN = ["block", "num_splits", "page_size"];

class Catalog {
  constructor({ recordings, packed, sram_sizes, cards, stories }) {
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
    let left = this.matching({ algorithm: wanted.algorithm });
    if (left.length === 0) left = this.matching({ algorithm: this.algorithms[0] });
    const size = nearest(sram, this.sramSizesOf(left[0].algorithm));
    left = left.filter(({ settings }) => (settings.sram_bytes ?? size) === size);
    const choices = {};
    for (const parameter of [...SHARED, ...OWN]) {
      const all = this.values(left, parameter);
      if (all.length === 0) continue;
      const fitting = this.values(left.filter((recording) => fits(recording, size)), parameter);
      const value = nearest(wanted[parameter], fitting.length ? fitting : all);
      choices[parameter] = all.map((choice) => ({
        value: choice,
        needs: fitting.includes(choice) ? null : leastSram(left, parameter, choice),
      }));
      left = left.filter(({ settings }) => settings[parameter] === value);
    }
    return { recording: left[0], choices, sram: size };
  }

  /** The trace of a recording, unpacked once. */
  trace(recording) {
    const key = recording.packed;
    if (!this.traces.has(key)) this.traces.set(key, unpack(this.packed[key]).then((packed) => new Trace(packed)));
    return this.traces.get(key);
  }
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
