// The questions that the page answers: each sets up the page at its telling moment, plays from there at `speed`, and is
// answered with the numbers of the recordings shown.

const LONG = { queries: "all", seqlen: 4096, head_dim: 64, mask: "full" };

const QUESTIONS = [
  { name: "memory_bound", state: { ...LONG, a: { algorithm: "standard" }, b: null, at: "scores_stored" }, speed: 0.25, answer: answerMemoryBound },
  { name: "tiling", state: { ...LONG, a: { algorithm: "flash2", block: "auto" }, b: { algorithm: "standard" }, sync: "bytes", at: "nearly_done" }, speed: 0.25, answer: answerTiling },
  { name: "loops", state: { ...LONG, a: { algorithm: "flash1", block: "64x64" }, b: { algorithm: "flash2", block: "64x64" }, sync: "share", at: "output_returns" }, speed: 0.05, answer: answerLoops },
  { name: "splits", state: { ...LONG, queries: "one", a: { algorithm: "flash_decoding", block: "1x128", num_splits: 1 }, b: { algorithm: "flash_decoding", block: "1x128", num_splits: 8 }, sync: "share", at: "merge" }, speed: 0.05, answer: answerSplits },
  { name: "pages", state: { queries: "one", seqlen: 64, a: { algorithm: "paged", page_size: 8 }, b: null, at: "copy" }, speed: 0.05, answer: answerPages },
];

function movedBy({ recording }, names) {
  return names.reduce((sum, name) => {
    const [read, written] = recording.traffic[name] ?? [0, 0];
    return sum + read + written;
  }, 0);
}

function allMoved({ recording }) {
  return recording.totals.hbm_read + recording.totals.hbm_written;
}

function answerMemoryBound({ a, card }) {
  const cost = costAt(a.trace, a.trace.length, card);
  return {
    flops: formatFlops(cost.flops), bytes: formatBytes(cost.bytes), intensity: threeDigits(cost.intensity),
    card: card.name, ridge: threeDigits(card.flops / card.bandwidth), memory: formatSeconds(cost.memory),
    compute: formatSeconds(cost.compute), scores: threeDigits((100 * movedBy(a, ["S", "P"])) / cost.bytes),
  };
}

function answerTiling({ a, b, card }) {
  const [mine, theirs] = [a, b].map((run) => costAt(run.trace, run.trace.length, card));
  return {
    mine: formatBytes(mine.bytes), theirs: formatBytes(theirs.bytes), ratio: formatRatio(theirs.bytes / mine.bytes),
    my_peak: formatBytes(a.recording.totals.hbm_peak), their_peak: formatBytes(b.recording.totals.hbm_peak),
    peak_ratio: formatRatio(b.recording.totals.hbm_peak / a.recording.totals.hbm_peak),
    my_intensity: threeDigits(mine.intensity), their_intensity: threeDigits(theirs.intensity),
    seqlen: a.recording.settings.seqlen,
  };
}

function answerLoops({ a, b }) {
  const carried = ["O", "m", "l", "lse"];
  const programs = (run) => run.kernels.find(({ name }) => name === "attention").programs.length;
  return {
    first: formatBytes(movedBy(a, carried)), second: formatBytes(movedBy(b, carried)),
    first_total: formatBytes(allMoved(a)), second_total: formatBytes(allMoved(b)),
    first_other: formatFlops(a.recording.totals.other_flops), second_other: formatFlops(b.recording.totals.other_flops),
    first_programs: programs(a), second_programs: programs(b),
    first_chain: formatBytes(a.chain), second_chain: formatBytes(b.chain),
  };
}

function answerSplits({ a, b, card }) {
  return {
    one: formatBytes(a.chain), many: formatBytes(b.chain), splits: b.recording.settings.num_splits,
    ratio: formatRatio(a.chain / b.chain), card: card.name, sm_count: card.sm_count,
    extra: formatBytes(allMoved(b) - allMoved(a)), share: threeDigits((100 * (allMoved(b) - allMoved(a))) / allMoved(a)),
  };
}

function answerPages({ a }) {
  const events = a.trace.data.map(([, data]) => data);
  const forked = events.find(({ op }) => op === "fork");
  const copied = events.find(({ op }) => op === "copy_on_write");
  return {
    shared: forked.ref_counts.filter((count) => count > 1).length, source: copied.source, block: copied.block,
    sequence: copied.sequence, still: copied.ref_counts.filter((count) => count > 1).length,
    used: copied.ref_counts.filter((count) => count > 0).length,
    without: Object.values(copied.tables).reduce((sum, table) => sum + table.length, 0),
    page_size: a.recording.settings.page_size,
  };
}
