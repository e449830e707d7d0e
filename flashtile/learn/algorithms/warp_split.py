"""FlashAttention-2's split of work between warps (Dao 2023, arXiv:2307.08691, section 3.3).

A thread block has a block of rows of Q in shared memory and loops over the blocks of keys. Its 4 or 8 warps
share the work on each tile of S in one of two ways (Figure 3 of the paper):

    split_k   Each warp takes a part of the keys: a slice of K and of V, and all rows of Q. Every warp then
              has a partial maximum, sum and output of every row. The warps write these to shared memory, wait
              for each other, and combine the partial results of each row. FlashAttention does this.
    split_q   Each warp takes a part of the rows, and all of K and V. The maxima, sums and outputs
              of its rows stay in its registers: the warps exchange nothing. FlashAttention-2 does this.

split_q reads each block of K and V once per warp, split_k only once in all. Still split_q moves less: in
split_k each warp writes a partial output of Br x d float32 numbers, which is read again. That is more than a
few copies of K and V. With four warps and 16-bit operands this holds up to about Bc = 2.7 Br.

Both splits are counted by the same rules. A warp reads each number that it needs once and keeps Q, its sums
and its accumulator in registers. Operands have the memory's ``element_bytes``; statistics and accumulators
are float32. Loading a tile from HBM takes two barriers in both: one before the tile is read, one before it is
overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import (
    blocks,
    log_sum_exp,
    lowest,
    nonzero,
    place,
    row_max,
    row_sum,
)
from flashtile.learn.algorithms.memory import Memory, Sram, Tile
from flashtile.learn.algorithms.trace import Event, Span
from flashtile.learn.algorithms.warps import Warps

FLOAT32 = 4
"""Bytes of a row statistic or an element of an accumulator."""

LOADED, USED, EXCHANGE = "tiles loaded", "tiles used", "exchange"
"""Purposes of barriers: each tile in shared memory needs the first two, split_k also the last."""


OPERANDS = {"Q": Tile(), "K": Tile(rows="keys"), "V": Tile(rows="keys")}
SPLIT_Q_TILES = {
    **OPERANDS,
    "S": Tile("S = Q K^T", "rows", "keys"),
    "P": Tile("P = exp(S - m)", "rows", "keys", name="S"),  # in the place of S
    "l": Tile("l = l exp(m - m') + rowsum P"),
    "O": Tile("O += P V"),
}
SPLIT_K_TILES = {
    **OPERANDS,
    "S": Tile("S = Q K^T", "rows", "keys"),
    "m_w": Tile("rowmax S", name="m"),
    "m": Tile("m = max", element_bytes=FLOAT32),
    "P": Tile("P = exp(S - m)", "rows", "keys", name="S"),
    "l": Tile("rowsum P", element_bytes=FLOAT32),
    "O_w": Tile("O = P V", name="O"),
    "O": Tile("O = exp(m - m') O + sum of the warps' O", element_bytes=FLOAT32),
}
"""Tiles of a warp, for the trace; ``m_w`` and ``O_w`` are m and O over the keys of this warp only."""

EXCHANGED_TILES = {
    "maxima": Tile(name="m of warps", element_bytes=FLOAT32),
    "sums": Tile(name="l of warps", element_bytes=FLOAT32),
    "outputs": Tile(name="O of warps", element_bytes=FLOAT32),
}
"""Tiles through which the warps of :func:`split_k` exchange data in shared memory."""


def split_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    num_warps: int = 4,
    block_m: int = 64,
    block_n: int = 64,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, Warps]:
    """Compute attention, with each warp taking a part of the rows of every query block.

    Returns (out, lse, warps). out is (seqlen_q, head_dim_v) and lse is (seqlen_q, 1). ``warps`` contains the
    counters of shared-memory traffic.

    Args:
        q, k, v, memory, softmax_scale: as for :func:`flashtile.algorithms.call.place`.
        num_warps: warps of a thread block; must divide block_m.
        block_m, block_n: Br and Bc, the tile of a thread block.

    Raises:
        ValueError: num_warps does not divide block_m.

    Examples:
        >>> from flashtile.algorithms import Memory, warp_split
        >>> q, k, v = torch.randn(3, 128, 32).unbind()
        >>> out, lse, warps = warp_split.split_q(q, k, v, Memory())
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
        >>> warps.written_bytes
        0
    """
    _check_divides(num_warps, "block_m", block_m)
    call = place(memory, q, k, v, softmax_scale=softmax_scale)
    O, LSE = call.empty_results(memory)
    warps = Warps(memory, num_warps, SPLIT_Q_TILES)
    for rows in blocks(call.Q.rows, block_m):
        with memory.sram(kernel="split-Q") as sram:
            q_i, parts = sram.load(call.Q, rows), _parts(rows, num_warps)
            warps.barrier(LOADED)
            for warp, own in zip(warps, parts, strict=True):
                warp.take(rows=own)
                q_w = warp.read("Q", _rows_of(q_i, own, rows))
                l, O_w = q.new_zeros(len(own), 1), q.new_zeros(len(own), call.V.cols)
                warp.start(Q=q_w, m=lowest(len(own), q), l=l, O=O_w)
            for keys in blocks(call.K.rows, block_n):
                with sram.scope():
                    k_j, v_j = call.load_keys(sram, keys)
                    warps.barrier(LOADED)
                    for warp in warps:
                        warp.take(keys=keys)
                        warp.S = warp.Q @ warp.read("K", k_j).T * call.scale
                        m_new = torch.maximum(warp.m, row_max(warp.S))
                        warp.P = torch.exp(warp.S - m_new)
                        correction = torch.exp(warp.m - m_new)
                        warp.l = correction * warp.l + row_sum(warp.P)
                        v_w = warp.read("V", v_j)
                        warp.O = correction * warp.O + warp.P @ v_w
                        warp.m = m_new
                    warps.barrier(USED)
            for warp, own in zip(warps, parts, strict=True):
                sram.store(O, warp.O / nonzero(warp.l), own)
                sram.store(LSE, log_sum_exp(warp.m, warp.l), own)
    return O.tensor, LSE.tensor, warps


def split_k(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    num_warps: int = 4,
    block_m: int = 64,
    block_n: int = 64,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, Warps]:
    """Compute attention, with each warp taking a part of the keys of every key block.

    Arguments and results are those of :func:`split_q`. ``num_warps`` must divide block_n and block_m. The
    warps exchange data twice for every tile of scores. First they exchange the row maxima, which the
    probabilities depend on. Then they exchange their partial sums and outputs, and each warp adds up those of
    its part of the rows.

    Examples:
        >>> from flashtile.algorithms import Memory, warp_split
        >>> q, k, v = torch.randn(3, 128, 32).unbind()
        >>> out, lse, warps = warp_split.split_k(q, k, v, Memory())
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
        >>> own, _, fewer = warp_split.split_q(q, k, v, Memory())
        >>> warps.read_bytes + warps.written_bytes > 2 * fewer.read_bytes
        True
    """
    _check_divides(num_warps, "block_n", block_n)
    _check_divides(num_warps, "block_m", block_m)
    call = place(memory, q, k, v, softmax_scale=softmax_scale)
    O, LSE = call.empty_results(memory)
    warps = Warps(memory, num_warps, SPLIT_K_TILES)
    for rows in blocks(call.Q.rows, block_m):
        with memory.sram("split-K", EXCHANGED_TILES, rows=rows) as sram:
            q_i = sram.load(call.Q, rows)
            warps.barrier(LOADED)
            for warp in warps:
                warp.take(rows=rows)
                warp.start(Q=warp.read("Q", q_i))
            m, l, acc = lowest(len(rows), q), q.new_zeros(len(rows), 1), q.new_zeros(len(rows), call.V.cols)
            for keys in blocks(call.K.rows, block_n):
                with sram.scope():
                    k_j, v_j = call.load_keys(sram, keys)
                    warps.barrier(LOADED)
                    slices = _parts(keys, num_warps)
                    for warp, own in zip(warps, slices, strict=True):
                        warp.take(keys=own)
                        warp.S = warp.Q @ warp.read("K", _rows_of(k_j, own, keys)).T * call.scale
                    m_new, correction = _exchange_maxima(sram, warps, m)
                    for warp, own in zip(warps, slices, strict=True):
                        warp.P = torch.exp(warp.S - m_new)
                        warp.l = row_sum(warp.P)
                        warp.O_w = warp.P @ warp.read("V", _rows_of(v_j, own, keys))
                    l, acc = _exchange_outputs(sram, warps, l, acc, correction, rows)
                    m = m_new
                    warps.barrier(USED)
            sram.store(O, acc / nonzero(l), rows)
            sram.store(LSE, log_sum_exp(m, l), rows)
    return O.tensor, LSE.tensor, warps


def _exchange_maxima(sram: Sram, warps: Warps, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return (new maximum of each row, correction factor of the earlier sums and outputs).

    Every warp writes the row maxima of its own keys to shared memory, and reads the maxima of all warps.
    """
    for warp in warps:  # the last block may have fewer keys than warps
        warp.m_w = row_max(warp.S) if warp.S.shape[1] else lowest(len(m), m)
    sram.maxima = torch.cat([warp.m_w for warp in warps], 1)
    for warp in warps:
        warp.write("m", warp.m_w)
    warps.barrier(EXCHANGE)
    for warp in warps:  # every warp needs the result and computes it
        m_new = torch.maximum(m, row_max(warp.read("m", sram.maxima)))
        correction = torch.exp(m - m_new)
        warp.m = m_new
    return m_new, correction


def _exchange_outputs(
    sram: Sram, warps: Warps, l: Tensor, acc: Tensor, correction: Tensor, rows: range
) -> tuple[Tensor, Tensor]:
    """Return the sums l (rows, 1) and outputs acc (rows, head_dim_v) after a further tile of keys.

    Every warp writes its partial sums and outputs of all rows to shared memory. Then it adds the partial
    results of all warps for its part of the rows.
    """
    sram.sums = torch.cat([warp.l for warp in warps], 1)
    sram.outputs = torch.stack([warp.O_w for warp in warps])
    for warp in warps:
        warp.write("l", warp.l)
        warp.write("O", warp.O_w)
    warps.barrier(EXCHANGE)
    sums, outputs = [], []
    for warp, own in zip(warps, _parts(rows, warps.count), strict=True):
        warp.take(rows=own)
        part = slice(own.start - rows.start, own.stop - rows.start)
        l_w, O_w = warp.read("l", sram.sums[part]), warp.read("O", sram.outputs[:, part])
        sums.append(correction[part] * l[part] + row_sum(l_w))
        warp.O = correction[part] * acc[part] + O_w.sum(0)
        outputs.append(warp.O)
        warp.take(rows=rows)
    return torch.cat(sums), torch.cat(outputs)


TENSOR_CORE, ARITHMETIC, SHARED_MEMORY, WAITING = "tensor core", "softmax", "shared memory", "barrier"

MATMUL_RATE, OTHER_RATE, SHARED_RATE = 512, 16, 128
"""Rates of an A100 per cycle: FLOPs of a warp's tensor core, FLOPs of its 16 lanes, bytes of shared memory.

The four tensor cores of a multiprocessor do 1024 fp16 multiply-adds per cycle; it has four times 16 fp32
lanes."""


def timeline(events: list[Event]) -> list[Span]:
    """Return the timeline of each warp, in cycles, from the events of :func:`split_q` or :func:`split_k`.

    The model is simple: a warp executes one operation after the other, products at the rate of its tensor
    core and the rest at the rate of its lanes. All warps share one shared memory, which serves one request at
    a time. A barrier lasts until the last warp arrives. HBM is infinitely fast.

    Examples:
        >>> from flashtile.algorithms import Memory, Trace, warp_split
        >>> q, k, v = torch.randn(3, 64, 32).unbind()
        >>> ends = []
        >>> for split in (warp_split.split_q, warp_split.split_k):
        ...     trace = Trace()
        ...     _ = split(q, k, v, Memory(trace=trace))
        ...     ends.append(max(span.end for span in warp_split.timeline(trace.events)))
        >>> ends[0] < ends[1]
        True
    """
    count = 1 + max((_warp_of(event) for event in events), default=0)
    free, spans = [0.0] * count, []
    for phase in _between_barriers(events):
        spans += _phase(phase, free)
        together = max(free)
        for warp, came in enumerate(free):
            if came < together:
                spans.append(Span(f"warp {warp}", WAITING, "", phase[-1][0], came, together))
        free = [together] * count
    return spans


def _between_barriers(events: list[Event]) -> Iterator[list[tuple[int, Event]]]:
    """Yield a list of (number, event) for each interval between barriers. Empty lists are left out."""
    phase: list[tuple[int, Event]] = []
    for number, event in enumerate(events):
        if event.kind in ("shared_load", "shared_store", "register"):
            phase.append((number, event))
        elif event.kind == "barrier" and phase:
            yield phase
            phase = []
    if phase:
        yield phase


def _phase(phase: list[tuple[int, Event]], free: list[float]) -> list[Span]:
    """Return the spans of the warps up to the next barrier.

    ``free`` holds the time at which each warp becomes free. It is updated in place.
    """
    queues = [[entry for entry in phase if _warp_of(entry[1]) == warp] for warp in range(len(free))]
    port, spans = 0.0, []
    while any(queues):
        warp = min((w for w, queue in enumerate(queues) if queue), key=lambda w: free[w])
        number, event = queues[warp].pop(0)
        array = event.name.split(".")[0]
        if event.kind == "register":
            work = [
                (TENSOR_CORE, event.matmul_flops / MATMUL_RATE),
                (ARITHMETIC, event.other_flops / OTHER_RATE),
            ]
        else:
            free[warp] = max(free[warp], port)
            port = free[warp] + event.bytes / SHARED_RATE
            work = [(SHARED_MEMORY, event.bytes / SHARED_RATE)]
        for unit, cycles in work:
            if cycles:
                start, free[warp] = free[warp], free[warp] + cycles
                spans.append(Span(f"warp {warp}", unit, array, number, start, free[warp]))
    return spans


def _warp_of(event: Event) -> int:
    """Return the number of the warp that an event belongs to, or -1 if it belongs to no warp."""
    _, dot, warp = event.name.partition(".")
    return int(warp) if dot else -1


def _check_divides(num_warps: int, name: str, block: int) -> None:
    if num_warps < 1 or block % num_warps:
        raise ValueError(f"num_warps must divide {name} ({block}), got {num_warps}")


def _parts(extent: range, count: int) -> list[range]:
    """Cut ``extent`` into ``count`` parts of equal length; the last ones may be shorter or empty."""
    size = -(-len(extent) // count)
    ends = [min(extent.start + size * i, extent.stop) for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _rows_of(tile: Tensor, rows: range, within: range) -> Tensor:
    return tile[rows.start - within.start : rows.stop - within.start]
