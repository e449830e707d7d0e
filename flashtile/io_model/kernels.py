"""The bytes that our GPU kernels move: what their programs load through L2, and what of it comes from DRAM.

Each kernel of ``flashtile.backends.portable`` is described by what one program owns and what it walks
(:mod:`flashtile.io_model.l2`). Checked against the counters of Nsight Compute (docs/io_model.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flashtile.io_model.calls import Call
from flashtile.io_model.cards import KIB, Card
from flashtile.io_model.l2 import Stream, dram_blocks
from flashtile.problem import UNLIMITED

L2_SHARE = 0.5
"""Of L2, what blocks that every SM reads can fill: each half of L2 keeps its own copy of them.
Not fitted; the counters bear it out."""

REGISTERS = 64 * KIB
"""Of one SM, in all architectures since Volta."""

RESERVED_SHARED = KIB
"""Shared memory that CUDA keeps for itself of each resident program, from compute capability 8.0 on."""

STATISTICS_BYTES = 8
"""Of a row, for the backward kernels: two fp32 that the preparation makes of out, dout and lse."""


class Tile(Protocol):
    """The part of a kernel's configuration that decides its traffic."""

    @property
    def BLOCK_M(self) -> int: ...  # noqa: N802
    @property
    def BLOCK_N(self) -> int: ...  # noqa: N802
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


@dataclass(frozen=True)
class KernelTraffic:
    """What one launch moves, in bytes.

    ``sm_read`` are the loads of all programs, served by L2 or DRAM; ``dram_read`` those that reach DRAM;
    ``written`` every result once; ``compulsory_read`` every input once. ``resident`` programs run at a time.
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


def forward(call: Call, tile: Tile, card: Card, *, programs_per_sm: int | None = None) -> KernelTraffic:
    """The forward kernel: a program owns BLOCK_M rows of q and walks the keys and values that they see."""
    per_sm = programs_per_sm or residents("forward", call, tile, card)
    width = (call.head_dim + call.width_v) * call.element_bytes
    walks = _row_walks(call, tile, width)
    return _traffic("forward", walks, call.q_bytes, call.out_bytes + call.lse_bytes, per_sm, card)


def dq(call: Call, tile: Tile, card: Card, *, programs_per_sm: int | None = None) -> KernelTraffic:
    """dQ: a program owns BLOCK_M rows of q and dout and walks keys and values as the forward kernel does."""
    per_sm = programs_per_sm or residents("dq", call, tile, card)
    width = (call.head_dim + call.width_v) * call.element_bytes
    walks = _row_walks(call, tile, width)
    own = call.q_bytes + call.out_bytes + call.rows_q * STATISTICS_BYTES
    return _traffic("dq", walks, own, call.q_bytes, per_sm, card)


def dkdv(call: Call, tile: Tile, card: Card, *, programs_per_sm: int | None = None) -> KernelTraffic:
    """dK and dV: a program owns BLOCK_N keys and values and walks the rows of q and dout that see them, of
    every query head of its group."""
    per_sm = programs_per_sm or residents("dkdv", call, tile, card)
    width = (call.head_dim + call.width_v) * call.element_bytes + STATISTICS_BYTES
    walks = []
    for (seqlen_q, seqlen_k), count in counted(call.sequences):
        blocks = -(-seqlen_q // tile.BLOCK_M)
        programs = []
        for start in range(0, seqlen_k, tile.BLOCK_N):
            end = min(start + tile.BLOCK_N, seqlen_k)
            # Seen from the keys, the window is mirrored.
            window = (call.window_right, call.window_left)
            rows = reach(start, end, seqlen_q - seqlen_k, seqlen_q, *window, tile.BLOCK_M)
            programs.append(
                tuple(range(g * blocks + rows.start, g * blocks + rows.stop) for g in range(call.group_size))
            )
        stream = Stream(blocks * call.group_size, tuple(programs))
        walks.append(_Walk(stream, count * call.num_heads_kv, _block_bytes(seqlen_q, tile.BLOCK_M, width)))
    own = call.k_bytes + call.v_bytes
    return _traffic("dkdv", walks, own, own, per_sm, card)


def preprocess(call: Call, card: Card) -> KernelTraffic:
    """What the backward pass needs of each row, computed once from out, dout and lse."""
    read = 2 * call.out_bytes + call.lse_bytes
    rows = sum(-(-seqlen_q // 128) * 128 for seqlen_q, _ in call.sequences) * call.num_heads_q
    programs = rows // 64
    return KernelTraffic("preprocess", programs, programs, read, read, rows * STATISTICS_BYTES, read)


def residents(kernel: str, call: Call, tile: Tile, card: Card) -> int:
    """Programs of a kernel ("forward", "dkdv" or "dq") that one SM holds, by its shared memory and registers.

    Shared memory is what the tiles take; registers are estimated from accumulators (and operands of fp32).
    """
    rows, keys = tile.BLOCK_M, tile.BLOCK_N
    widths = _padded(call.head_dim) + _padded(call.width_v)
    # Elements in shared memory that a program owns and walks; fp32 that it sums in; tiles of fp32 scores.
    owned, walked, sums, scores = {
        "forward": (rows * _padded(call.head_dim), keys * widths, rows * _padded(call.width_v), 1),
        "dkdv": (keys * widths, rows * widths, keys * widths, 2),
        "dq": (rows * widths, keys * widths, rows * _padded(call.head_dim), 2),
    }[kernel]
    shared = (owned + max(1, tile.num_stages) * walked) * call.element_bytes
    threads = tile.num_warps * 32
    masked = call.window_left != UNLIMITED or call.window_right != UNLIMITED
    # fp32 operands are split into tf32 parts, for which they pass through registers.
    split = owned + walked if call.element_bytes == 4 else 0
    registers = (sums + 1.5 * scores * rows * keys + split) / threads + (64 if masked else 48)
    registers = min(256, -(-int(registers) // 8) * 8)
    fits = min(card.shared_bytes // (shared + RESERVED_SHARED), REGISTERS // (registers * threads))
    return max(1, min(32, fits))


def reach(
    start: int, end: int, offset: int, length: int, window_back: int, window_ahead: int, block: int
) -> range:
    """Blocks of a sequence of ``length`` that positions ``start <= i < end`` of the other one see: ``i`` from
    ``i + offset - window_back`` to ``i + offset + window_ahead``, either unlimited if -1."""
    first = 0 if window_back == UNLIMITED else max(0, start + offset - window_back)
    after = length if window_ahead == UNLIMITED else min(length, max(0, end + offset + window_ahead))
    last = -(-after // block)
    return range(min(first // block, last), last)


@dataclass(frozen=True)
class _Walk:
    """Equal streams, consecutive in the grid."""

    stream: Stream
    count: int
    block_bytes: float


def _row_walks(call: Call, tile: Tile, width: int) -> list[_Walk]:
    """Keys and values as programs that own rows walk them; a mask to the right makes the last rows first."""
    walks = []
    for (seqlen_q, seqlen_k), count in counted(call.sequences):
        programs = [
            (
                reach(
                    start, min(start + tile.BLOCK_M, seqlen_q), seqlen_k - seqlen_q, seqlen_k,
                    call.window_left, call.window_right, tile.BLOCK_N,
                ),
            )
            for start in range(0, seqlen_q, tile.BLOCK_M)
        ]  # fmt: skip
        if call.window_right != UNLIMITED:
            programs.reverse()
        stream = Stream(-(-seqlen_k // tile.BLOCK_N), tuple(programs) * call.group_size)
        walks.append(_Walk(stream, count * call.num_heads_kv, _block_bytes(seqlen_k, tile.BLOCK_N, width)))
    return walks


def _traffic(
    name: str, walks: list[_Walk], own_read: int, written: int, programs_per_sm: int, card: Card
) -> KernelTraffic:
    resident = programs_per_sm * card.sm_count
    loaded = sum(walk.stream.walked * walk.count * walk.block_bytes for walk in walks)
    compulsory = sum(walk.stream.distinct * walk.count * walk.block_bytes for walk in walks)
    missed = sum(
        walk.block_bytes
        * dram_blocks(walk.stream, walk.count, resident, L2_SHARE * card.l2_bytes / walk.block_bytes)
        for walk in walks
    )
    return KernelTraffic(
        name=name,
        programs=sum(len(walk.stream.programs) * walk.count for walk in walks),
        resident=resident,
        sm_read=own_read + loaded,
        dram_read=own_read + missed,
        written=written,
        compulsory_read=round(own_read + compulsory),
    )


def _block_bytes(length: int, block: int, width: int) -> float:
    """Mean bytes of a block: the last one of a sequence may be short."""
    return length * width / max(1, -(-length // block))


def counted(sequences: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], int]]:
    """Neighbouring sequences of equal lengths as one pair with a count; none without queries or keys."""
    counted: list[tuple[tuple[int, int], int]] = []
    for lengths in sequences:
        if counted and counted[-1][0] == lengths:
            counted[-1] = (lengths, counted[-1][1] + 1)
        else:
            counted.append((lengths, 1))
    return [pair for pair in counted if min(pair[0]) > 0]


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())
