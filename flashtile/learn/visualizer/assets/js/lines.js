// Which line of its paper's algorithm an event is. Papers whose algorithm has no numbers got ours.

const ANY = "";
const PAPERS = {
  standard: ["FlashAttention, algorithm 0", [
    ["S", ANY, ANY, 1], ["softmax", ANY, ANY, 2], ["O", ANY, ANY, 3],
  ]],
  standard_backward: ["FlashAttention, algorithm 3", [
    ["dV", ANY, ANY, 1], ["dP", ANY, ANY, 2], ["softmax gradient", ANY, ANY, 3], ["dQ", ANY, ANY, 4], ["dK", ANY, ANY, 5],
  ]],
  flash1: ["FlashAttention, algorithm 1", [
    ["initialise", ANY, ANY, 2], ["attention", "load", "K", 6], ["attention", "load", "V", 6], ["attention", "load", ANY, 8],
    ["attention", "S = Q K^T", "S", 9], ["attention", "compute", "S", 10], ["attention", "compute", "m_ij", 10],
    ["attention", "compute", "l_ij", 10], ["attention", "compute", "O", 12], ["attention", "store", "O", 12],
    ["attention", "compute", ANY, 11], ["attention", "store", ANY, 13],
  ]],
  flash1_backward: ["FlashAttention, algorithm 4", [
    ["initialise", ANY, ANY, 5], ["gradients", "load", "K", 7], ["gradients", "load", "V", 7], ["gradients", "load", ANY, 10],
    ["gradients", "dP = dO V^T", "dS", 17], ["gradients", "compute", "dS", 20], ["gradients", "compute", "D", 19],
    ["gradients", "compute", "S", 13], ["gradients", "dV += P^T dO", "dV", 16], ["gradients", "dK += dS^T Q", "dK", 22],
    ["gradients", "compute", "dV", 8], ["gradients", "compute", "dK", 8], ["gradients", ANY, "dQ", 21], ["gradients", "store", ANY, 24],
  ]],
  flash2: ["FlashAttention-2, algorithm 1", [
    [ANY, "load", "Q", 4], [ANY, "load", ANY, 7], [ANY, "S = Q K^T", "S", 8], [ANY, "P = exp(S - m)", "S", 9],
    [ANY, "O = exp(m - m') O + P V", "O", 10], [ANY, "store", "O", 14], [ANY, "store", "lse", 15],
    [ANY, "l = l exp(m - m') + rowsum P", "l", 9], [ANY, "m = max", "m", 9], [ANY, "compute", "O", 5], [ANY, "compute", "l", 5],
    [ANY, "compute", "m", 5],
  ]],
  flash2_backward: ["FlashAttention-2, algorithm 2", [
    ["rowsum dO * O", "store", "dQ", 3], ["rowsum dO * O", ANY, ANY, 4],
    ["gradients", "load", "K", 6], ["gradients", "load", "V", 6], ["gradients", "load", ANY, 9], ["gradients", "compute", "S", 11],
    ["gradients", "dV += P^T dO", "dV", 12], ["gradients", "dP = dO V^T", "dS", 13], ["gradients", "compute", "dS", 14],
    ["gradients", ANY, "dQ", 15], ["gradients", "dK += dS^T Q", "dK", 16], ["gradients", "compute", ANY, 7],
    ["gradients", "store", ANY, 18],
  ]],
  flash3: ["FlashAttention-3, algorithm 2", [
    [ANY, "load", "Q", 3], [ANY, "load", ANY, 8], [ANY, "S = Q K^T", "S", 9], [ANY, "O += P V", "O", 11],
    [ANY, "O = exp(m - m') O", "O", 14], [ANY, "compute", "P", 13], [ANY, "l = l exp(m - m') + rowsum P", "l", 13],
    [ANY, "m = max", "m", 13], [ANY, "compute", ANY, 2], [ANY, "store", ANY, 20],
  ]],
  flash_decoding: ["Flash-Decoding", [
    ["merge", "load", ANY, 14], ["merge", "m = max", ANY, 15], ["merge", "l = l exp(m - m') + exp(lse_s - m')", ANY, 15],
    ["merge", "O = exp(m - m') O + exp(lse_s - m') O_s", ANY, 16], ["merge", "compute", ANY, 12], ["merge", "store", ANY, 18],
    ["split", "load", "Q", 2], ["split", "load", ANY, 5], ["split", "S = Q K^T", "S", 6], ["split", "P = exp(S - m)", "S", 7],
    ["split", "l = l exp(m - m') + rowsum P", "l", 7], ["split", "m = max", "m", 7],
    ["split", "O = exp(m - m') O + P V", "O", 8], ["split", "compute", ANY, 3], ["split", "store", ANY, 10],
  ]],
  unified_max: ["FlashDecoding++", [
    ["merge", ANY, ANY, 12], ["recompute", ANY, ANY, 11], ["split", "load", "Q", 2], ["split", "load", ANY, 5],
    ["split", "S = Q K^T - phi", "S", 6], ["split", "P = exp(S)", "S", 7], ["split", "l += rowsum P", "l", 7],
    ["split", "O += P V", "O", 8], ["split", "compute", ANY, 3], ["split", "store", ANY, 10],
  ]],
  paged: ["PagedAttention", [
    [ANY, "allocate", ANY, 2], [ANY, "copy_on_write", ANY, 3], ["copy on write", ANY, ANY, 3], [ANY, "fork", ANY, 5],
    [ANY, "append", ANY, 4], ["append", "store", ANY, 4], ["attention", "load", "table", 9], ["attention", "load", "Q", 7],
    ["attention", "load", ANY, 10], ["attention", "S = Q K^T", "S", 11], ["attention", "P = exp(S - m)", "S", 12],
    ["attention", "l = l exp(m - m') + rowsum P", "l", 12], ["attention", "m = max", "m", 12],
    ["attention", "O = exp(m - m') O + P V", "O", 13], ["attention", "compute", ANY, 7], ["attention", "store", ANY, 15],
  ]],
};

/** A paper's algorithm in the language of the page. */
function paperName(paper, language) {
  return paper.replace(", algorithm ", language.text("paper_algorithm"));
}

/** {paper, line} of an event; null where there is none. A rule's second word is a kind of event, or what it computes. */
function lineOf(algorithm, event) {
  if (!event || !["load", "store", "compute", "page"].includes(event.kind)) return null;
  const [paper, rules] = PAPERS[algorithm];
  const fits = (wanted, ...given) => wanted === ANY || given.includes(wanted);
  const rule = rules.find(([kernel, what, array]) => fits(kernel, event.kernel) && fits(what, event.kind, event.op) && fits(array, event.array));
  return rule ? { paper, line: rule[3] } : null;
}

/** The line of the last event up to a position that has one, null before there is any: frees belong to no line. */
function lastLine({ trace, recording }, position) {
  for (let i = position - 1; i >= 0; i--) {
    const line = lineOf(recording.algorithm, trace.event(i));
    if (line) return line;
  }
  return null;
}
