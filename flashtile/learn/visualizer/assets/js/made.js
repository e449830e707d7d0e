// Runs that are made on the page: any length up to 64 in any blocks, with all of their numbers; and larger ones with
// another size of an element, for their bytes alone. Python records all others.

const SHORTEST_MADE = 4;
const LONGEST_MADE = 64;
const MADE_DIM = 4;
const WINDOW_SHARE = 4;
const MADE = { standard, flash1, flash2 };
const MADE_BLOCK = "2x2";
const ELEMENTS = [1, 2, 4]; // bytes
const MOST_TOKENS = 4096;
const [LARGE_DIM, LARGE_BLOCK, MOST_BLOCKS] = [64, "64x64", 64];
const INPUTS = ["random", "counting"]; // counting: one query whose scores are 1, 2, 3, ...
const MAX_WORDS = 10;

class Maker {
  /** `table`: q, k and v of 64 tokens. */
  constructor(table) {
    this.table = table;
    this.runs = new Map();
  }

  makes({ algorithm, queries, seqlen, element }) {
    if (!(algorithm in MADE) || !(seqlen <= MOST_TOKENS)) return false;
    return ELEMENTS.includes(element) || (queries !== "one" && seqlen <= LONGEST_MADE);
  }

  /** The recording, as the catalogue has others. */
  recording({ algorithm, queries, seqlen, head_dim, mask, block, element, inputs, words }, sram) {
    const spoken = tokensOf(words);
    if (spoken.length > 1) seqlen = spoken.length;
    const small = seqlen <= LONGEST_MADE;
    const tokens = spoken.length > 1 ? seqlen : Math.max(Math.floor(seqlen), SHORTEST_MADE);
    const windows = { full: [-1, -1], causal: [-1, 0], window: [Math.floor(tokens / WINDOW_SHARE) - 1, 0] };
    const seen = mask in windows ? mask : "full";
    const settings = {
      queries: queries === "one" ? "one" : "all", seqlen: tokens, head_dim: small ? MADE_DIM : LARGE_DIM, mask: seen, window_size: windows[seen],
      inputs: INPUTS.includes(inputs) && small ? inputs : INPUTS[0], element: ELEMENTS.includes(element) ? element : 2,
      ...(spoken.length > 1 && { words: spoken.join(" ") }),
    };
    const rows = queries === "one" ? 1 : tokens;
    if (algorithm === "standard") settings.sram_bytes = sram;
    else {
      const [high, wide] = blockOf(block, small ? MADE_BLOCK : LARGE_BLOCK);
      const least = small ? 1 : Math.ceil(tokens / MOST_BLOCKS);
      settings.block = `${Math.min(Math.max(high, least), rows)}x${Math.min(Math.max(wide, least), tokens)}`;
    }
    const key = JSON.stringify([algorithm, settings]);
    if (!this.runs.has(key)) this.runs.set(key, this.#make(algorithm, settings, sram));
    return this.runs.get(key);
  }

  #make(algorithm, settings, sram) {
    const { seqlen, head_dim, element } = settings;
    const rows = settings.queries === "one" ? 1 : seqlen;
    const machine = new Machine(element, sram);
    const { q, k, v, scale } = this.#inputs(settings, rows);
    const call = {
      Q: machine.place("Q", rows, head_dim, q), K: machine.place("K", seqlen, head_dim, k), V: machine.place("V", seqlen, head_dim, v),
      scale, mask: new Mask(rows, seqlen, settings.window_size),
    };
    const [Br, Bc] = settings.block ? blockOf(settings.block) : [];
    MADE[algorithm](machine, call, Br, Bc);
    const trace = machine.trace();
    const last = (column) => trace[column][trace.length];
    const totals = {
      hbm_read: last("read"), hbm_written: last("written"), matmul_flops: last("matmul"), other_flops: last("other"),
      sram_peak: last("sramPeak"), hbm_peak: last("hbmPeak"),
    };
    const traffic = Object.fromEntries([...trace.traffic].map(([name, { read, written }]) => [name, [read.at(-1), written.at(-1)]]));
    const blocks = Br ? { block_m: Br, block_n: Bc } : {};
    return { algorithm, settings: { ...settings, ...blocks }, totals, traffic, events: trace.length, trace };
  }

  /** q, k and v of a word, which follow from its letters: equal words have equal numbers, from -2 to 2. */
  vectorsOf(word) {
    let state = 0x811c9dc5; // FNV-1a
    const mix = (number) => (state = Math.imul(state ^ number, 0x01000193) >>> 0);
    const next = () => {
      mix(0x9e);
      return Math.round((((state >>> 8) % 4001) - 2000) / 100) / 10;
    };
    for (const letter of word.toLowerCase().replace(/[.,;:!?]+$/, "")) mix(letter.codePointAt(0));
    return Array.from({ length: 3 }, () => Array.from({ length: MADE_DIM }, next));
  }

  #inputs({ seqlen, head_dim, inputs, words }, rows) {
    const unit = (length, at) => Array.from({ length }, (_, i) => (i === at ? 1 : 0));
    if (seqlen > LONGEST_MADE) return { q: null, k: null, v: null, scale: head_dim ** -0.5 };
    if (inputs === "counting") {
      return {
        q: Array.from({ length: rows }, () => unit(head_dim, 0)), scale: 1,
        k: Array.from({ length: seqlen }, (_, j) => unit(head_dim, 0).map((x) => x * (j + 1))),
        v: Array.from({ length: seqlen }, (_, j) => unit(head_dim, j % head_dim)),
      };
    }
    if (words) {
      const vectors = words.split(" ").map((word) => this.vectorsOf(word));
      return { q: vectors.slice(0, rows).map(([q]) => q), k: vectors.map(([, k]) => k), v: vectors.map(([, , v]) => v), scale: head_dim ** -0.5 };
    }
    const { q, k, v } = this.table;
    return { q: q.slice(0, rows), k: k.slice(0, seqlen), v: v.slice(0, seqlen), scale: head_dim ** -0.5 };
  }
}

/** The words of a sentence; in Chinese, its characters. */
function tokensOf(sentence) {
  return ((sentence ?? "").match(/[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+/gu) ?? []).slice(0, MAX_WORDS);
}

/** [queries, keys] of "64x64", of the alternative where it is none. */
function blockOf(block, alternative) {
  const sizes = /^([1-9]\d*)x([1-9]\d*)$/.exec(block ?? "") ?? alternative.split("x").slice(-2);
  return sizes.slice(-2).map(Number);
}
