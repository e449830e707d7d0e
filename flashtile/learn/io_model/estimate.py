"""Time floors of a call: an algorithm's bytes and FLOPs, divided by the bandwidth and peak of a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.backends.common.config import padded
from flashtile.backends.portable import fits
from flashtile.backends.portable.config import Config, row_for
from flashtile.hardware.calls import Call, least_bytes, least_flops
from flashtile.hardware.cards import Card
from flashtile.learn.algorithms import flash1, flash2
from flashtile.learn.algorithms.memory import Memory
from flashtile.learn.io_model import closed_forms, decode, hopper, kernels
from flashtile.problems.common import MAX_HEAD_DIM

PASSES = ("forward", "backward")

STANDARD = "standard"
FLASH1 = "flash-attention 1"
FLASH2 = "flash-attention 2"
FLASHTILE = "flashtile, portable"
HOPPER = "flashtile, Hopper"
DECODING = "flash-decoding"
OVER_CACHE = "flashtile, over a cache"
LEAST = "least possible"

PAPERS = {
    "forward": (
        closed_forms.standard_forward,
        (flash1.block_sizes, closed_forms.flash1_forward),
        (flash2.block_sizes, closed_forms.flash2_forward),
    ),
    "backward": (
        closed_forms.standard_backward,
        (flash1.backward_block_sizes, closed_forms.flash1_backward),
        (flash2.backward_block_sizes, closed_forms.flash2_backward),
    ),
}
"""Closed forms by pass, with the function that derives block sizes from the size of SRAM."""

Counted = tuple[str, float, float, float, int, int]
"""The fields of :class:`Estimate` that come after ``which``, in order."""

DECODE_ROWS = 128
"""Largest number of query rows per key/value head for which Flash-Decoding is listed."""

DECODE_BLOCK_N = 64

L2_BYTES_PER_CLOCK = 64
"""Most bytes that an SM loads from L2 per clock.

The number is that of Volta (Jia et al. 2018, arXiv:1804.06826) and is used for all cards.
"""


@dataclass(frozen=True)
class Estimate:
    """One pass of one algorithm on a card, in bytes, FLOPs and lower bounds of seconds.

    ``bytes`` are moved to and from HBM, ``sm_bytes`` to and from the SMs. L2 serves the difference. The
    papers do not count L2, so both numbers are equal for their algorithms. ``extra_bytes`` are held in
    addition to inputs and results. ``programs`` is the number of programs that can run in parallel. If it is
    smaller than the number of SMs, the other SMs are idle. 0 means at least one program per SM.
    """

    call: Call
    card: Card
    which: str
    algorithm: str
    bytes: float
    sm_bytes: float
    flops: float
    extra_bytes: int
    programs: int

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes held in HBM at a time, including inputs and results."""
        return resident_bytes(self.call, self.which) + self.extra_bytes

    @property
    def busy(self) -> int:
        """Number of SMs in use."""
        return min(self.programs or self.card.sm_count, self.card.sm_count)

    @property
    def compute_seconds(self) -> float:
        peak = self.card.peak_tflops(self.call.dtype)
        return self.flops / (peak * 1e12 * self.busy / self.card.sm_count)

    @property
    def memory_seconds(self) -> float:
        return self.bytes / (self.card.bandwidth_gbps * 1e9)

    @property
    def l2_seconds(self) -> float:
        """Lower bound of the time of loads and stores through L2; 0 if the card's clock is not known."""
        rate = self.busy * L2_BYTES_PER_CLOCK * self.card.clock_mhz * 1e6
        return self.sm_bytes / rate if rate else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def floor_seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.l2_seconds)

    @property
    def bound(self) -> str:
        """Resource that takes the longest time: "compute", "HBM", or "L2" (loads of the SMs in use)."""
        names = {"compute": self.compute_seconds, "HBM": self.memory_seconds, "L2": self.l2_seconds}
        return max(names, key=lambda name: names[name])


def estimates(call: Call, card: Card, which: str = "forward") -> list[Estimate]:
    """Return the estimates of all algorithms that support the call.

    The last estimate is not an algorithm. It has the fewest bytes and FLOPs that any algorithm could need.

    Raises:
        ValueError: ``which`` is not a pass, or is "backward" for a call over a cache; the card has no peak
            for the call's dtype; or no decoding kernel supports a call over a cache.

    Examples:
        >>> from flashtile.io_model import Call, estimates, find_card
        >>> call = Call(1, 4096, 4096, 16, 16, 64)
        >>> for row in estimates(call, find_card("a100"))[:3]:
        ...     print(f"{row.algorithm}: {row.floor_seconds * 1e6:.0f} us, bound by {row.bound}")
        standard: 1070 us, bound by HBM
        flash-attention 1: 1487 us, bound by compute
        flash-attention 2: 220 us, bound by compute
    """
    if which not in PASSES:
        raise ValueError(f"which must be one of {', '.join(PASSES)}, got {which!r}")
    card.peak_tflops(call.dtype)  # raises if the peak is unknown
    return [Estimate(call, card, which, *cost) for cost in _costs(call, card, which)]


def resident_bytes(call: Call, which: str) -> int:
    """Return the size in bytes of q, k, v and out. For the backward pass, their gradients are included."""
    held = call.q_bytes + call.k_bytes + call.v_bytes + call.out_bytes
    return held if which == "forward" else 2 * held


def portable_config(call: Call, card: Card) -> Config:
    """Return the configuration of flashtile's portable kernels for the call on the card.

    Raises:
        ValueError: the kernels do not support the head size or the dtype.
    """
    widest = max(call.head_dim, call.width_v)
    if widest > MAX_HEAD_DIM or call.element_bytes not in (2, 4):
        raise ValueError(
            f"head_dim must be at most {MAX_HEAD_DIM} and dtype 16 or 32 bits, got {widest}, {call.dtype}"
        )
    if not fits(card.capability, call.element_bytes, widest):
        raise ValueError(f"head_dim {widest} in {call.dtype} does not fit the shared memory of {card.name}")
    return row_for(card.capability, call.element_bytes, padded(widest), call.has_window)


def _costs(call: Call, card: Card, which: str) -> Iterator[Counted]:
    least, flops = least_bytes(call, which), least_flops(call, which)
    if call.page_size is not None:
        if which != "forward":
            raise ValueError(f"which must be 'forward' over a cache, got {which!r}")
        launches = decode.kernels_of(call, card)
        extra = call.lse_bytes + sum(kernel.sm_read for kernel in launches[1:])
        yield _launched(OVER_CACHE, launches, flops, int(extra))
    else:
        yield from _papers(call, card, which)
        if card.shared_bytes:
            yield from _ours(call, card, which)
            if which == "forward" and hopper.serves(call, card):
                yield _launched(HOPPER, [hopper.forward(call, card)], flops, call.lse_bytes)
            if which == "forward" and call.seqlen_q * call.group_size <= DECODE_ROWS:
                yield _decoding(call, card)
    yield LEAST, least, least, flops, 0, 0


def _papers(call: Call, card: Card, which: str) -> Iterator[Counted]:
    """Yield the bytes, FLOPs and number of programs of each of the papers' algorithms.

    FlashAttention 1 has a program for each head. FlashAttention 2 has one for each block of query rows, and
    in the backward pass one for each block of keys.
    """
    standard, first, second = PAPERS[which]
    yield _paper(STANDARD, standard(call), 0)
    if card.shared_bytes:
        memory = Memory(card.shared_bytes, call.element_bytes)
        for algorithm, (block_sizes, cost) in ((FLASH1, first), (FLASH2, second)):
            blocks = block_sizes(memory, call.head_dim, call.width_v)
            side = PASSES.index(which)
            per_head = [-(-lengths[side] // blocks[side]) for lengths in call.sequences]
            programs = len(per_head) if algorithm == FLASH1 else sum(per_head)
            yield _paper(algorithm, cost(call, blocks), programs * call.num_heads_q)


def _paper(algorithm: str, cost: closed_forms.Cost, programs: int) -> Counted:
    return algorithm, cost.hbm_bytes, cost.hbm_bytes, cost.matmul_flops, cost.extra_bytes, programs


def _launched(
    algorithm: str, launches: list[kernels.KernelTraffic], flops: float, extra_bytes: int
) -> Counted:
    moved = sum(kernel.dram_bytes for kernel in launches)
    through_l2 = sum(kernel.sm_read + kernel.written for kernel in launches)
    return algorithm, moved, through_l2, flops, extra_bytes, min(kernel.programs for kernel in launches)


def _ours(call: Call, card: Card, which: str) -> Iterator[Counted]:
    """Yield bytes, FLOPs and number of programs of the portable kernels, or nothing for unsupported calls."""
    try:
        config = portable_config(call, card)
    except ValueError:
        return
    if which == "forward":
        launches = [kernels.forward(call, config.forward, card)]
        flops = least_flops(call, which)
        extra = call.lse_bytes
    else:
        launches = [
            kernels.preprocess(call, card),
            kernels.dkdv(call, config.dkdv, card),
            kernels.dq(call, config.dq, card),
        ]
        # Seven products: the scores and dP are computed for dK and dV, and again for dQ.
        flops = 2 * call.visible_pairs * (4 * call.head_dim + 3 * call.width_v)
        extra = call.lse_bytes + call.rows_q * kernels.STATISTICS_BYTES
    yield _launched(FLASHTILE, launches, flops, extra)


def _decoding(call: Call, card: Card) -> Counted:
    """Return the numbers of bytes, FLOPs and programs of Flash-Decoding.

    The keys are split so often that every SM has a program, if there are enough keys.
    """
    heads = max(1, len(call.sequences) * call.num_heads_kv)
    blocks = max(1, -(-call.seqlen_k // DECODE_BLOCK_N))
    splits = min(blocks, max(1, -(-card.sm_count // heads)))
    return _paper(DECODING, closed_forms.flash_decoding(call, splits), heads * splits)
