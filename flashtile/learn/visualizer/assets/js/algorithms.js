// Standard attention, FlashAttention and FlashAttention-2 on the machine, as flashtile/algorithms has them. `call` is Q, K
// and V in HBM, the scale and the mask; numbers are null where a run is made for its bytes alone.

const MOST_STRIP = 16;

const product = (a, b) => a && a.map((row) => b[0].map((_, j) => row.reduce((sum, x, i) => sum + x * b[i][j], 0)));
const transposed = (a) => a && a[0].map((_, j) => a.map((row) => row[j]));
const each = (f, a, ...others) => a && a.map((row, i) => row.map((x, j) => f(x, ...others.map((other) => other[i][other[i].length === 1 ? 0 : j]))));
const reduced = (f, start, a) => a && a.map((row) => [row.reduce((x, y) => f(x, y), start)]);
const rowMax = (a) => reduced(Math.max, LOWEST, a);
const rowSum = (a) => reduced((x, y) => x + y, 0, a);
const filled = (rows, width, value, like) => like && Array.from({ length: rows[1] - rows[0] }, () => new Array(width).fill(value));
const nonzero = (l) => l || 1;
const numbersOf = ({ numbers }) => (numbers[0].length ? numbers : null);
const heightOf = ([start, end]) => end - start;

function blocksOf(length, size) {
  return Array.from({ length: Math.ceil(length / size) }, (_, i) => [i * size, Math.min((i + 1) * size, length)]);
}

/** Which keys a query sees: the last query stands at the last key; -1 is no limit. */
class Mask {
  constructor(rows, keys, [left, right]) {
    Object.assign(this, { keys, offset: keys - rows, left, right });
  }

  sees(row, key) {
    const distance = key - row - this.offset;
    return (this.left < 0 || distance >= -this.left) && (this.right < 0 || distance <= this.right);
  }

  seesAny([top, bottom], [start, end]) {
    const first = this.left < 0 ? 0 : Math.max(0, top + this.offset - this.left);
    const last = this.right < 0 ? this.keys : Math.min(this.keys, bottom + this.offset + this.right);
    return Math.max(first, start) < Math.min(last, end);
  }

  hide(scores, rows, keys) {
    return scores && scores.map((row, i) => row.map((x, j) => (this.sees(rows[0] + i, keys[0] + j) ? x : -Infinity)));
  }
}

function scoresOf(machine, { scale, mask }, q, k, rows, keys, depth) {
  machine.count(2 * heightOf(rows) * heightOf(keys) * depth, heightOf(rows) * heightOf(keys));
  return mask.hide(each((x) => x * scale, product(q, transposed(k))), rows, keys);
}

function standard(machine, call) {
  const { Q, K, V, scale, mask } = call;
  const S = machine.empty("S", Q.rows, K.rows);
  const finish = (s, rows, keys) => mask.hide(each((x) => x * scale, s), rows, keys);
  tiledProduct(machine, Q, K, S, { transposeB: true, finish });
  const P = machine.empty("P", Q.rows, K.rows);
  writeSoftmax(machine, S, P);
  machine.release(S);
  tiledProduct(machine, P, V, machine.empty("O", Q.rows, V.cols), {});
}

function tiledProduct(machine, A, B, C, { transposeB = false, finish = null }) {
  const M = machine.sramElements;
  const strip = Math.max(1, Math.min(Math.floor(Math.floor(Math.sqrt(M)) / 4), MOST_STRIP));
  const blockN = Math.min(Math.floor(Math.sqrt(strip ** 2 + M)) - strip, Math.max(C.cols, 1));
  const blockM = Math.floor((M - strip * blockN) / (blockN + strip));
  const op = `${C.name} += ${A.name} ${B.name}${transposeB ? "^T" : ""}`;
  const finished = (c, rows, cols) => (finish ? finish(c, rows, cols) : c);
  for (const rows of blocksOf(C.rows, blockM)) {
    for (const cols of blocksOf(C.cols, blockN)) {
      machine.program(C.name, (sram) => {
        let c = sram.compute(C.name, filled(rows, heightOf(cols), 0, numbersOf(A)), rows, cols);
        for (const part of blocksOf(A.cols, strip)) {
          const a = sram.load(A, rows, part);
          const b = transposeB ? transposed(sram.load(B, cols, part)) : sram.load(B, part, cols);
          machine.count(2 * heightOf(rows) * heightOf(cols) * heightOf(part), heightOf(rows) * heightOf(cols));
          c = c && each((x, y) => x + y, c, product(a, b));
          sram.compute(C.name, finished(c, rows, cols), rows, cols, op); // the numbers that are stored and read again
        }
        if (finish) machine.count(0, heightOf(rows) * heightOf(cols));
        sram.store(C, finished(c, rows, cols), rows, cols);
      });
    }
  }
}

function writeSoftmax(machine, X, Y) {
  const statistics = 2;
  const blockN = Math.min(Math.max(X.cols, 1), machine.sramElements - statistics);
  const blockM = Math.floor(machine.sramElements / (blockN + statistics));
  for (const rows of blocksOf(X.rows, blockM)) {
    machine.program("softmax", (sram) => {
      const [r, like] = [heightOf(rows), numbersOf(X)];
      let m = sram.compute("m", filled(rows, 1, LOWEST, like), rows, null);
      let l = sram.compute("l", filled(rows, 1, 0, like), rows, null);
      let x = null;
      for (const cols of blocksOf(X.cols, blockN)) {
        x = sram.load(X, rows, cols);
        const next = each(Math.max, m, rowMax(x));
        const sum = rowSum(each((s, top) => Math.exp(s - top), x, next));
        machine.count(0, 4 * r * heightOf(cols) + 6 * r);
        l = sram.compute("l", each((old, before, after, more) => old * Math.exp(before - after) + more, l, m, next, sum), rows, null, "l = l exp(m - m') + sum exp(x - m')");
        m = sram.compute("m", next, rows, null, "m = m'");
      }
      for (const cols of blocksOf(X.cols, blockN)) {
        if (blockN < X.cols) x = sram.load(X, rows, cols);
        machine.count(0, 3 * r * heightOf(cols));
        sram.store(Y, each((s, top, sum) => Math.exp(s - top) / nonzero(sum), x, m, l), rows, cols);
      }
    });
  }
}

function flash1(machine, { Q, K, V, ...call }, Br, Bc) {
  const [d, like] = [V.cols, numbersOf(Q)];
  const [O, L, M] = [machine.empty("O", Q.rows, d), machine.empty("l", Q.rows, 1), machine.empty("m", Q.rows, 1)];
  for (const rows of blocksOf(Q.rows, Br)) {
    machine.program("initialise", (sram) => {
      sram.store(O, filled(rows, d, 0, like), rows);
      sram.store(L, filled(rows, 1, 0, like), rows);
      machine.count(0, heightOf(rows));
      sram.store(M, filled(rows, 1, LOWEST, like), rows);
    });
  }
  for (const keys of blocksOf(K.rows, Bc)) {
    machine.program("attention", (outer) => {
      const [k, v] = [outer.load(K, keys), outer.load(V, keys)];
      for (const rows of blocksOf(Q.rows, Br)) machine.scope((sram) => flash1Tile(machine, sram, { Q, O, L, M, ...call }, k, v, rows, keys));
    });
  }
}

function flash1Tile(machine, sram, { Q, O, L, M, ...call }, k, v, rows, keys) {
  const [r, c, d] = [heightOf(rows), heightOf(keys), O.cols];
  const [q, o, l, m] = [Q, O, L, M].map((array) => sram.load(array, rows));
  const s = sram.compute("S", scoresOf(machine, call, q, k, rows, keys, Q.cols), rows, keys, "S = Q K^T");
  machine.count(0, r * c + r);
  const tileMax = sram.compute("m_ij", rowMax(s), rows, null, "rowmax S");
  machine.count(0, 2 * r * c);
  const p = sram.compute("S", each((x, top) => Math.exp(x - top), s, tileMax), rows, keys, "P = exp(S - m)");
  machine.count(0, r * c);
  const tileSum = sram.compute("l_ij", rowSum(p), rows, null, "rowsum P");
  const next = each(Math.max, m, tileMax);
  const [old, fresh] = [each((x, y) => Math.exp(x - y), m, next), each((x, y) => Math.exp(x - y), tileMax, next)];
  machine.count(0, 8 * r);
  const sum = sram.compute("l", each((a, x, b, y) => a * x + b * y, old, l, fresh, tileSum), rows, null, "l = l exp(m - m') + rowsum P");
  machine.count(2 * r * c * d, r + 4 * r * d);
  const output = each((y, x, oldSum, a, b, newSum) => (oldSum * a * x + b * y) / nonzero(newSum), p && product(p, v), o, l, old, fresh, sum);
  sram.store(O, sram.accumulate("O", d, output, rows, "O = rescaled O + P V"), rows);
  sram.store(L, sum, rows);
  sram.store(M, sram.compute("m", next, rows, null, "m = max"), rows);
}

function flash2(machine, { Q, K, V, ...call }, Br, Bc) {
  const [d, like] = [V.cols, numbersOf(Q)];
  const [O, LSE] = [machine.empty("O", Q.rows, d), machine.empty("lse", Q.rows, 1)];
  for (const rows of blocksOf(Q.rows, Br)) {
    machine.program("attention", (outer) => {
      const q = outer.load(Q, rows);
      const held = {
        acc: outer.accumulate("O", d, filled(rows, d, 0, like), rows),
        l: outer.compute("l", filled(rows, 1, 0, like), rows, null),
        m: outer.compute("m", filled(rows, 1, LOWEST, like), rows, null),
      };
      for (const keys of blocksOf(K.rows, Bc)) {
        if (call.mask.seesAny(rows, keys)) machine.scope((sram) => flash2Tile(machine, outer, sram, { K, V, ...call }, q, held, rows, keys));
        else machine.record("skip", "S", rows, keys, 0);
      }
      machine.count(0, heightOf(rows) * d);
      outer.store(O, each((x, sum) => x / nonzero(sum), held.acc, held.l), rows);
      machine.count(0, 2 * heightOf(rows));
      outer.store(LSE, each((sum, top) => (sum === 0 ? -Infinity : top + Math.log(sum)), held.l, held.m), rows);
    });
  }
}

function flash2Tile(machine, outer, sram, { K, V, ...call }, q, held, rows, keys) {
  const [r, c, d] = [heightOf(rows), heightOf(keys), V.cols];
  const [k, v] = [sram.load(K, keys), sram.load(V, keys)];
  const s = sram.compute("S", scoresOf(machine, call, q, k, rows, keys, K.cols), rows, keys, "S = Q K^T");
  const next = each(Math.max, held.m, rowMax(s));
  machine.count(0, 3 * r * c + 2 * r);
  const p = sram.compute("S", each((x, top) => Math.exp(x - top), s, next), rows, keys, "P = exp(S - m)");
  const correction = each((x, y) => Math.exp(x - y), held.m, next);
  machine.count(0, r * c + 4 * r);
  held.l = outer.compute("l", each((x, a, sum) => a * x + sum, held.l, correction, rowSum(p)), rows, null, "l = l exp(m - m') + rowsum P");
  machine.count(2 * r * c * d, 2 * r * d);
  held.acc = outer.accumulate("O", d, each((x, a, y) => a * x + y, held.acc, correction, p && product(p, v)), rows, "O = exp(m - m') O + P V");
  held.m = outer.compute("m", next, rows, null, "m = max");
}
