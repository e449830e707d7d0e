// Moments of a run that are worth a look: how many of its events have happened. Undefined where it has none.

const MOMENTS = {
  end: ({ trace }) => trace.length,
  first_tile: ({ trace }) => after(trace, ({ array, kind }) => array === "S" && kind === "compute"),
  second_tile: (run) => run.trace.nextTile(MOMENTS.first_tile(run) ?? 0, 1),
  scores_stored: ({ trace }) => after(trace, ({ array, kind }) => array === "S" && kind === "store"),
  output_returns: ({ trace }) => {
    const left = after(trace, ({ array, kind, kernel }) => array === "O" && kind === "store" && kernel === "attention");
    return left && after(trace, ({ array, kind, row }) => array === "O" && kind === "load" && row === trace.row[left - 1], left);
  },
  scores_ready: (run) => MOMENTS.scores_stored(run) - 1,
  weights_stored: ({ trace }) => after(trace, ({ array, kind }) => array === "P" && kind === "store"),
  queries_loaded: ({ trace }) => after(trace, ({ array, kind }) => array === "Q" && kind === "load"),
  values_loaded: ({ trace }) => after(trace, ({ array, kind }) => array === "V" && kind === "load"),
  output_added: ({ trace }) => after(trace, ({ array, kind, op }) => array === "O" && kind === "compute" && op !== ""),
  first_block: (run) => MOMENTS.output_added(run),
  second_block: ({ trace }) => after(trace, ({ array, kind }) => array === "m" && kind === "compute", MOMENTS.output_added({ trace })),
  second_output: (run) => MOMENTS.second_block(run) + 1,
  gradients_placed: ({ trace }) => after(trace, ({ array, kind }) => array === "dV" && kind === "empty"),
  row_sums_ready: ({ trace }) => after(trace, ({ kernel }) => kernel === "gradients") - 3, // before what they were made of is freed
  weights_again: ({ trace }) => after(trace, ({ op }) => op.startsWith("P = exp")),
  score_gradients: ({ trace }) => after(trace, ({ op }) => op.startsWith("dS =")),
  keys_added: ({ trace }) => after(trace, ({ op }) => op.startsWith("dK +=")),
  nearly_done: ({ trace }) => Math.floor(0.9 * trace.length),
  merge: ({ trace }) => after(trace, ({ kernel }) => kernel === "merge"),
  copy: ({ trace }) => trace.data.find(([, data]) => data.op === "copy_on_write")?.[0],
  copied: (run) => MOMENTS.copy(run) + 1,
  before_fork: ({ trace }) => trace.data.find(([, data]) => data.op === "fork")?.[0],
  fork: (run) => MOMENTS.before_fork(run) + 1,
};

/** How many events have happened when the first one from `start` on that `is` has. */
function after(trace, is, start = 0) {
  for (let i = start; i < trace.length; i++) if (is(trace.event(i))) return i + 1;
  return undefined;
}
