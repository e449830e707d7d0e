"""Bytes that flashtile's GPU kernels move: loads through L2, and the part of them that reaches DRAM.

A kernel of ``flashtile.backends.portable`` is described by the tile that one program owns and the blocks that
it loops over (:mod:`flashtile.io_model.l2`). The results were checked against the counters of Nsight Compute
(docs/io_model.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from flashtile.backends.common.config import KernelConfig, padded
from flashtile.hardware.calls import Call, walks
from flashtile.hardware.cards import KIB, Card
from flashtile.learn.io_model.l2 import Stream, dram_blocks
from flashtile.problems.common import UNLIMITED

L2_SHARE = 0.5
"""Share of L2 that is available to blocks read by all SMs. Each half of L2 keeps its own copy of such blocks.

The value is not fitted; the counters of Nsight Compute confirm it.
"""

REGISTERS = 64 * KIB
"""32-bit registers of one SM, in all architectures since Volta."""

RESERVED_SHARED = KIB
"""Bytes of shared memory that CUDA reserves per resident program, from compute capability 8.0 on."""

STATISTIC_BYTES = 4
"""Bytes of a running maximum, a sum, a log-sum-exp or an element of a partial result: fp32."""

STATISTICS_BYTES = 2 * STATISTIC_BYTES
"""Bytes per row of the two numbers that ``preprocess`` computes for the other backward kernels."""


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes that one launch moves.

    ``sm_read`` counts the loads of all programs, served by L2 or DRAM, and ``dram_read`` those that reach
    DRAM. ``written`` counts every result once, ``compulsory_read`` every input once. ``resident`` programs
    run at a time.
    """

    name: str
    programs: int
    resident: int
    sm_read: float
    dram_read: float
    written: int
    compulsory_read: int

    @property
    def dram_bytes(self) -> float:
        return self.dram_read + self.written


def forward(call: Call, tile: KernelConfig, card: Card) -> KernelTraffic:
    """Return the traffic of the forward kernel.

    A program owns BLOCK_M rows of q and loops over the keys and values that these rows attend to.
    """
    return _traffic("forward", call, tile, card, call.q_bytes, call.out_bytes + call.lse_bytes)


def dq(call: Call, tile: KernelConfig, card: Card) -> KernelTraffic:
    """Return the traffic of the kernel of dQ.

    A program owns BLOCK_M rows of q and dout and loops over keys and values, as in :func:`forward`.
    """
    own = call.q_bytes + call.out_bytes + call.rows_q * STATISTICS_BYTES
    return _traffic("dq", call, tile, card, own, call.q_bytes)


def dkdv(call: Call, tile: KernelConfig, card: Card) -> KernelTraffic:
    """Return the traffic of the kernel of dK and dV.

    A program owns BLOCK_N keys and values. It loops over the rows of q and dout that attend to these keys, in
    every query head of the group.
    """
    own = call.k_bytes + call.v_bytes
    return _traffic("dkdv", call, tile, card, own, own)


def preprocess(call: Call, card: Card) -> KernelTraffic:
    """Return the traffic of the kernel that computes the backward pass's row statistics.

    The kernel reads out, dout and lse.
    """
    read = 2 * call.out_bytes + call.lse_bytes
    rows = sum(-(-seqlen_q // 128) * 128 for seqlen_q, _ in call.sequences) * call.num_heads_q
    programs = rows // 64
    return KernelTraffic("preprocess", programs, programs, read, read, rows * STATISTICS_BYTES, read)


def residents(kernel: str, call: Call, tile: KernelConfig, card: Card) -> int:
    """Return how many programs of a kernel ("forward", "dkdv" or "dq") fit on one SM.

    Shared memory and registers limit the number. Tiles are in shared memory. Registers are estimated from the
    accumulators, the scores and fp32 operands.
    """
    rows, keys = tile.BLOCK_M, tile.BLOCK_N
    widths = padded(call.head_dim) + padded(call.width_v)
    # Shared memory: elements of the tile that a program owns, elements of one block that it loops over.
    # Registers: elements of fp32 accumulators, number of fp32 score tiles.
    owned, walked, sums, scores = {
        "forward": (rows * padded(call.head_dim), keys * widths, rows * padded(call.width_v), 1),
        "dkdv": (keys * widths, rows * widths, keys * widths, 2),
        "dq": (rows * widths, keys * widths, rows * padded(call.head_dim), 2),
    }[kernel]
    shared = (owned + max(1, tile.num_stages) * walked) * call.element_bytes
    threads = tile.num_warps * 32
    masked = call.has_window
    # fp32 operands are split into tf32 parts in registers.
    split = owned + walked if call.element_bytes == 4 else 0
    registers = (sums + 1.5 * scores * rows * keys + split) / threads + (64 if masked else 48)
    registers = min(256, -(-int(registers) // 8) * 8)
    fits = min(card.shared_bytes // (shared + RESERVED_SHARED), REGISTERS // (registers * threads))
    return max(1, min(32, fits))


def _traffic(
    kernel: str, call: Call, tile: KernelConfig, card: Card, own_read: int, written: int
) -> KernelTraffic:
    """Return the traffic of a kernel.

    Each program owns a block of query rows, or of keys in the kernel "dkdv". All programs together read
    ``own_read`` bytes of the blocks that they own, and write ``written`` bytes.
    """
    by_keys = kernel == "dkdv"
    width = (call.head_dim + call.width_v) * call.element_bytes + by_keys * STATISTICS_BYTES
    resident = residents(kernel, call, tile, card) * card.sm_count
    programs = 0
    loaded = compulsory = missed = 0.0
    for lengths, count in counted(call.sequences):
        seen = walks(call, lengths, (tile.BLOCK_M, tile.BLOCK_N), by_keys=by_keys)
        length, block = (lengths[0], tile.BLOCK_M) if by_keys else (lengths[1], tile.BLOCK_N)
        blocks = -(-length // block)
        if by_keys:  # all query heads of a group, one after the other
            starts = range(0, call.group_size * blocks, blocks)
            owners = [tuple(range(at + part.start, at + part.stop) for at in starts) for part in seen]
            stream = Stream(blocks * call.group_size, tuple(owners))
        else:  # with a window limited to the right, the last rows run first
            ordered = seen if call.window_right == UNLIMITED else seen[::-1]
            stream = Stream(blocks, tuple((part,) for part in ordered) * call.group_size)
        count *= call.num_heads_kv
        block_bytes = length * width / blocks  # on average: the last block may be short
        programs += len(stream.programs) * count
        loaded += stream.walked * count * block_bytes
        compulsory += stream.distinct * count * block_bytes
        missed += block_bytes * dram_blocks(stream, count, resident, L2_SHARE * card.l2_bytes / block_bytes)
    return KernelTraffic(
        name=kernel,
        programs=programs,
        resident=resident,
        sm_read=own_read + loaded,
        dram_read=own_read + missed,
        written=written,
        compulsory_read=round(own_read + compulsory),
    )


def counted(sequences: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], int]]:
    """Merge neighbouring sequences of equal lengths into (lengths, count).

    Sequences without queries or keys are dropped.
    """
    return [(lengths, len(list(equal))) for lengths, equal in groupby(sequences) if min(lengths) > 0]
