// Which line of its paper's algorithm an event is. Papers without numbered lines have none.

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
};

/** {paper, line} of an event; null where there is none. A rule's second word is a kind of event, or what it computes. */
function lineOf(algorithm, event) {
  if (!event || !["load", "store", "compute"].includes(event.kind)) return null;
  const [paper, rules] = PAPERS[algorithm] ?? ["", []];
  const fits = (wanted, ...given) => wanted === ANY || given.includes(wanted);
  const rule = rules.find(([kernel, what, array]) => fits(kernel, event.kernel) && fits(what, event.kind, event.op) && fits(array, event.array));
  return rule ? { paper, line: rule[3] } : null;
}

/** The line of the last event up to a position that has one, null before there is any: frees belong to no line. */
function lastLine({ trace, recording }, position) {
  if (!(recording.algorithm in PAPERS)) return null;
  for (let i = position - 1; i >= 0; i--) {
    const line = lineOf(recording.algorithm, trace.event(i));
    if (line) return line;
  }
  return null;
}
