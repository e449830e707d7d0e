// The formula of the step that was just done, with its sizes, and with the numbers of the watched row where they are known.

const scores = ({ size, rows, cols, d, scale }) => `S ${size} = Q (${rows} × ${d}) · Kᵀ (${d} × ${cols}) · ${scale}`;
const maximum = ({ of }) => `m = max(m, rowmax(S))${of("m", ({ m, next }) => `max(${m}, …) = ${next}`)}`;
const sum = ({ of }) => `ℓ = ℓ exp(m − m′) + rowsum(P)${of("ℓ", ({ l, m, next, added, sum }) => `${l} · exp(${m} − ${next}) + ${added} = ${sum}`)}`;
const factor = ({ of }) => of("exp(m − m′)", ({ m, next, factor }) => `exp(${m} − ${next}) = ${factor}`);

/** By what an event computes. `of` adds the numbers of the watched row. */
const FORMULAS = {
  "S = Q K^T": scores,
  "S += Q K^T": scores,
  "O += P V": () => "O = O + P V",
  "P = exp(S - m)": ({ size }) => `P ${size} = exp(S − m)`,
  "rowmax S": () => "m̃ = rowmax(S)",
  "rowsum P": () => "ℓ̃ = rowsum(P)",
  "m = max": maximum,
  "m = m'": maximum,
  "l = l exp(m - m') + rowsum P": sum,
  "l = l exp(m - m') + sum exp(x - m')": sum,
  "O = exp(m - m') O + P V": (step) => `O = exp(m − m′) O + P V${factor(step)}`,
  "O = rescaled O + P V": (step) => `O = (ℓ exp(m − m′) O + exp(m̃ − m′) P V) / ℓ′${factor(step)}`,
};

/** Empty where nothing is computed or moved. */
function formulaOf({ trace, recording }, position, row) {
  const event = position > 0 ? trace.event(position - 1) : null;
  if (!event) return "";
  const [rows, cols] = [event.rows, event.cols || 1];
  if (event.kind === "load" || event.kind === "store") return `${event.name}: ${rows} × ${cols} · ${event.bytes / (rows * cols)} B = ${formatBytes(event.bytes)}`;
  const formula = event.kind === "compute" ? FORMULAS[event.op] : undefined;
  if (!formula) return "";
  const { head_dim: d, inputs } = recording.settings;
  const inside = row !== undefined && event.row <= row && row < event.row + rows;
  const of = (name, say) => {
    const numbers = inside ? numbersOfRow(trace, position, row) : null;
    return numbers ? `;  ${name}[${row}] = ${say(numbers)}` : "";
  };
  return formula({ rows, cols, size: `(${rows} × ${cols})`, d, scale: inputs === "counting" ? 1 : `1/√${d}`, of });
}

/** m and l of a row before and after the tile that the event at `position` - 1 belongs to; null before there are any. */
function numbersOfRow(trace, position, row) {
  const of = (name) => trace.series.find((series) => series.name === name && series.row === row);
  const [m, l] = [of("m"), of("l")];
  if (!m || !l) return null;
  const changed = (name, from) => {
    for (let i = from; i < trace.length; i++) {
      const { array, kind, op, rows } = trace.forms[trace.form[i]];
      if (array === name && kind === "compute" && op && trace.row[i] <= row && row < trace.row[i] + rows) return i;
    }
    return -1;
  };
  const tile = beginningOfTile(trace, position);
  const [newM, newL] = [changed("m", tile), changed("l", tile)];
  if (tile < 0 || newM < 0 || newL < 0) return null;
  const [before, after, old, now] = [trace.valueAt(m, tile), trace.valueAt(m, newM + 1), trace.valueAt(l, tile), trace.valueAt(l, newL + 1)];
  if ([before, after, old, now].includes(undefined)) return null;
  const shrink = Math.exp(before - after);
  const numbers = { m: before, next: after, l: old, sum: now, factor: shrink, added: now - old * shrink };
  return Object.fromEntries(Object.entries(numbers).map(([name, number]) => [name, formatStatistic(number)]));
}

/** The event that computes the scores of the tile at a position: the last before it, else the first. */
function beginningOfTile(trace, position) {
  const begins = (i) => {
    const { array, kind, op } = trace.forms[trace.form[i]];
    return kind === "compute" && array === "S" && op.startsWith("S");
  };
  for (let i = position - 1; i >= 0; i--) if (begins(i)) return i;
  for (let i = position; i < trace.length; i++) if (begins(i)) return i;
  return -1;
}
