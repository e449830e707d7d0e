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
  nearly_done: ({ trace }) => Math.floor(0.9 * trace.length),
  merge: ({ trace }) => after(trace, ({ kernel }) => kernel === "merge"),
  copy: ({ trace }) => trace.data.find(([, data]) => data.op === "copy_on_write")?.[0],
};

/** How many events have happened when the first one from `start` on that `is` has. */
function after(trace, is, start = 0) {
  for (let i = start; i < trace.length; i++) if (is(trace.event(i))) return i + 1;
  return undefined;
}
