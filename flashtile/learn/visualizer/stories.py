"""The page's stories: each shows one idea with a few short runs next to each other.

A story consists of a function here, which runs its algorithm once for each case and keeps the trace, a
drawing of one case in ``assets/js/stories/NAME.js``, and texts in both languages in
``assets/texts/stories/NAME.json``. A new story is added to :data:`STORIES`. The button, the address, the
player, the counters of bytes and operations, and the captions are shared by all stories.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashtile import masks as library
from flashtile.learn.algorithms import (
    Memory,
    Tile,
    Trace,
    flash2,
    flash3_fp8,
    flash3_schedule,
    flash_decoding,
    online_softmax,
    product_chain,
    reservation,
    tiled_matmul,
    unified_max,
    warp_split,
)
from flashtile.learn.algorithms.call import blocks, lowest, row_sum
from flashtile.learn.algorithms.trace import Event
from flashtile.learn.visualizer.packing import pack
from flashtile.masks.block_mask import listed
from flashtile.masks.mods import MaskMod


@dataclass(frozen=True)
class Case:
    """One run of a story.

    Args:
        name: name of the case; the story's texts describe it under ``case_NAME`` and ``about_NAME``.
        trace: events of the run.
        facts: further data for the drawing, in the form of JSON: inputs, results, errors.
        variant: input of the run, if a story has several; cases with the same input are shown together.
    """

    name: str
    trace: Trace
    facts: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    def as_record(self) -> dict[str, Any]:
        return {
            "name": self.name, "variant": self.variant, "packed": pack(self.trace), "facts": self.facts,
        }  # fmt: skip


def numbers(tensor: Tensor, digits: int = 6) -> list[Any]:
    """Return a tensor as nested lists for JSON; infinities and NaN become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)

    return plain(tensor.tolist())


SOFTMAX_ROWS = {"article": [1.0, 2.0, 3.0, 4.0], "large": [10.0, 20.0, 80.0, 100.0]}
"""Rows whose softmax is taken; exp(100) overflows float32."""

SOFTMAX_VALUES = [10.0, 20.0, 30.0, 40.0]
"""Values that the one-pass variant averages with the softmax as weights."""

SOFTMAX_BLOCK = 2


def softmax() -> Iterator[Case]:
    """Yield the softmax of four numbers in two blocks, by each of the four methods of ``online_softmax``."""
    for variant, row in SOFTMAX_ROWS.items():
        x, v = torch.tensor([row], device="cpu"), torch.tensor(SOFTMAX_VALUES, device="cpu")[:, None]
        for name in ("naive", "safe", "online"):
            trace = Trace()
            y = getattr(online_softmax, name)(x, Memory(trace=trace), block_n=SOFTMAX_BLOCK)
            yield Case(name, trace, {"x": row, "result": numbers(y[0])}, variant)
        trace = Trace()
        out = online_softmax.average(x, v, Memory(trace=trace), block_n=SOFTMAX_BLOCK)
        yield Case("average", trace, {"x": row, "v": SOFTMAX_VALUES, "result": numbers(out[0])}, variant)


MATMUL_SIZE = 8
MATMUL_STRIP = 4
MATMUL_TILES = {"element": (1, 1), "block": (4, 1), "warp": (4, 2)}
"""Sides of the square tiles of a thread block and of a warp."""

MATMUL_FACTORS = {"product": (1.0, 0.0), "scaled": (2.0, 0.5)}
"""(alpha, beta) of each variant."""


def matmul() -> Iterator[Case]:
    """Yield C = alpha A B + beta C of 8 x 8 matrices, with three tilings of C.

    A thread block computes a single element, a tile, or a tile that is cut into tiles of warps.
    """
    a, b, c = torch.randn(
        3, MATMUL_SIZE, MATMUL_SIZE, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    for variant, (alpha, beta) in MATMUL_FACTORS.items():
        for name, (block, warp) in MATMUL_TILES.items():
            trace = Trace()
            tiled_matmul.two_levels(
                a, b, Memory(trace=trace), c=c, alpha=alpha, beta=beta,
                block_m=block, block_n=block, block_k=MATMUL_STRIP, warp_m=warp, warp_n=warp,
            )  # fmt: skip
            facts = {"size": MATMUL_SIZE, "block": block, "warp": warp, "alpha": alpha, "beta": beta}
            yield Case(name, trace, facts, variant)


CHAIN_SEQLEN, CHAIN_HEAD_DIM, CHAIN_BLOCK = 6, 4, 2


def chain() -> Iterator[Case]:
    """Yield Q K^T V without a softmax in three ways: with S in HBM, without S in HBM, and as Q (K^T V)."""
    q, k, v = torch.randn(
        3, CHAIN_SEQLEN, CHAIN_HEAD_DIM, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    facts = {"seqlen": CHAIN_SEQLEN, "head_dim": CHAIN_HEAD_DIM}
    for name in ("separate", "fused", "reordered"):
        trace = Trace()
        options = {} if name == "reordered" else {"block_m": CHAIN_BLOCK, "block_n": CHAIN_BLOCK}
        getattr(product_chain, name)(q, k, v, Memory(trace=trace), **options)
        yield Case(name, trace, facts)


WARPS_NUM_WARPS, WARPS_ROWS, WARPS_KEYS, WARPS_HEAD_DIM, WARPS_BLOCK = 4, 64, 128, 64, 64
"""Sizes for one thread block with two tiles of scores."""


def warps() -> Iterator[Case]:
    """Yield attention by four warps of a thread block, which share the work by keys or by rows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, WARPS_HEAD_DIM, generator=generator, device="cpu")
        for rows in (WARPS_ROWS, WARPS_KEYS, WARPS_KEYS)
    )
    traces = {name: Trace() for name in ("split_k", "split_q")}
    for name, trace in traces.items():
        getattr(warp_split, name)(
            q, k, v, Memory(trace=trace), num_warps=WARPS_NUM_WARPS, block_m=WARPS_BLOCK, block_n=WARPS_BLOCK
        )
        trace.spans = warp_split.timeline(trace.events)
    cycles = max(span.end for trace in traces.values() for span in trace.spans)
    for name, trace in traces.items():
        yield Case(name, trace, {"num_warps": WARPS_NUM_WARPS, "cycles": cycles})


TURNS: dict[str, dict[str, bool]] = {
    "together": {"pingpong": False, "pipelined": False},
    "pingpong": {"pingpong": True, "pipelined": False},
    "pipelined": {"pingpong": False, "pipelined": True},
    "both": {"pingpong": True, "pipelined": True},
}
TURNS_BLOCKS = 4
TICKS = 8
"""Events in the time of a product."""


def turns() -> Iterator[Case]:
    """Yield the timeline of a thread block of FlashAttention-3 with none, either and both of its overlaps.

    An event is a tick of the clock. The trace's spans and the fact ``waits`` say who works and who waits.
    """
    timelines = {name: flash3_schedule.timeline(TURNS_BLOCKS, **options) for name, options in TURNS.items()}
    ends = {name: max(span.end for span in spans) for name, (spans, _) in timelines.items()}
    for name, (spans, waits) in timelines.items():
        end = ends[name]
        trace = Trace(events=[Event("tick", "time")] * round(end * TICKS), spans=spans)
        facts = {
            "ticks": TICKS,
            "end": end,
            "longest": max(ends.values()),
            "busy": round(100 * flash3_schedule.busy(spans, flash3_schedule.TENSOR_CORE)),
            "waits": [list(wait) for wait in waits],
        }
        yield Case(name, trace, facts)


BACKWARD_SEQLEN, BACKWARD_HEAD_DIM, BACKWARD_BLOCK = 6, 2, 2


class Numbered(Memory):
    """A memory that keeps the numbers of each tile that is computed or moved, by the number of its event."""

    def __init__(self, trace: Trace):
        super().__init__(trace=trace)
        self.numbers: dict[int, list[Any]] = {}

    def record(
        self,
        kind: str,
        name: str,
        rows: range | None = None,
        cols: range | None = None,
        bytes: int = 0,
        op: str = "",
        column: Tensor | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        super().record(kind, name, rows, cols, bytes, op, column, data)
        if column is not None and self.trace is not None:
            self.numbers[len(self.trace.events) - 1] = numbers(column, 3)


def backward_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout, each (BACKWARD_SEQLEN, BACKWARD_HEAD_DIM)."""
    generator = torch.Generator().manual_seed(1)
    shape = (4, BACKWARD_SEQLEN, BACKWARD_HEAD_DIM)
    q, k, v, dout = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64)
    return q, k, v, dout


def backward() -> Iterator[Case]:
    """Yield FlashAttention-2's backward pass with all of its numbers."""
    q, k, v, dout = backward_inputs()
    out, lse = flash2.forward(q, k, v, Memory(), block_m=BACKWARD_BLOCK, block_n=BACKWARD_BLOCK)
    memory = Numbered(Trace())
    flash2.backward(q, k, v, out, lse, dout, memory, block_m=BACKWARD_BLOCK, block_n=BACKWARD_BLOCK)
    assert memory.trace is not None
    writes = sum(
        e.kind == "store" and e.name == "dQ" and e.rows == (0, BACKWARD_BLOCK) for e in memory.trace.events
    )
    facts = {
        "seqlen": BACKWARD_SEQLEN,
        "head_dim": BACKWARD_HEAD_DIM,
        "blocks": BACKWARD_SEQLEN // BACKWARD_BLOCK,
        "writes": writes,
        "lse": numbers(lse, 3),
        "numbers": memory.numbers,
    }
    yield Case("flash2", memory.trace, facts)


ROUNDED = [0.0006, 0.0023, 0.0071, 0.013, 0.031, 0.082]
"""Small numbers, such as the weights of a model."""


def rounding() -> Iterator[Case]:
    """Yield the rounding of small numbers to e4m3, as they are and divided by a scale."""
    x = torch.tensor(ROUNDED, device="cpu")
    values = torch.arange(1, 127, device="cpu", dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    tiles = {"R": Tile("e4m3(x / scale)", None, "cols", name="X")}
    for name in ("plain", "scaled"):
        trace = Trace()
        memory = Memory(trace=trace)
        X = memory.place("X", x[None])
        scale = x.abs().max() / flash3_fp8.LARGEST if name == "scaled" else torch.tensor(1.0, device="cpu")
        found = []
        for i in range(len(x)):
            with memory.sram(tiles=tiles, cols=range(i, i + 1)) as sram:
                one = sram.load(X, cols=range(i, i + 1))
                sram.R = flash3_fp8.round_to_e4m3(one / scale)
                found.append((sram.R * scale).item())
        errors = [abs(r - y) / y for r, y in zip(found, ROUNDED, strict=True)]
        facts = {
            "x": ROUNDED,
            "stored": [float(f"{r:.3g}") for r in found],
            "errors": errors,
            "scale": float(f"{scale.item():.3g}"),
            "values": numbers(values),
            "percent": float(f"{100 * max(errors):.3g}"),
        }
        yield Case(name, trace, facts)


FP8_SEQLEN, FP8_HEAD_DIM, FP8_BLOCK, FP8_COLUMN = 32, 32, 8, 3
FP8_CASES: dict[str, dict[str, Any]] = {
    "tensor": {"block_scales": False, "incoherent": False},
    "block": {"block_scales": True, "incoherent": False},
    "rotated": {"block_scales": True, "incoherent": True},
}
FP8_HUGE = 200_000.0
"""An outlier so large that other numbers lose bits. Smaller outliers do no harm: e4m3 has an exponent."""

FP8_LOUD = 0.25
"""Threshold of the absolute rounding error. Ordinary numbers around 1 have smaller errors."""


def fp8_inputs(variant: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, (FP8_SEQLEN, FP8_HEAD_DIM), normally distributed except for outliers."""
    q, k, v = torch.randn(
        3, FP8_SEQLEN, FP8_HEAD_DIM, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    if variant == "column":  # outliers in the same column of q and k, as in real models
        q[:, FP8_COLUMN] = 20 + q[:, FP8_COLUMN] / 2
        k[:, FP8_COLUMN] = -15 + k[:, FP8_COLUMN] / 2
    elif variant == "huge":
        q[FP8_BLOCK - 1, FP8_COLUMN] = FP8_HUGE
    return q, k, v


def fp8() -> Iterator[Case]:
    """Yield attention in e4m3 with and without outliers, by three methods.

    The methods are one scale per tensor, one scale per block of rows, and block scales after a rotation.
    """
    for variant in ("column", "huge", "none"):
        q, k, v = fp8_inputs(variant)
        exact, _ = flash2.forward(
            q.double(), k.double(), v.double(), Memory(), block_m=FP8_BLOCK, block_n=FP8_BLOCK
        )
        for name, options in FP8_CASES.items():
            trace = Trace()
            out, _ = flash3_fp8.forward(
                q, k, v, Memory(trace=trace), block_m=FP8_BLOCK, block_n=FP8_BLOCK, **options
            )
            error = ((out - exact).norm() / exact.norm()).item()
            rows = FP8_BLOCK if options["block_scales"] else FP8_SEQLEN
            rotation = flash3_fp8.random_rotation(q, seed=0) if options["incoherent"] else None
            facts = {"error": error, "percent": float(f"{100 * error:.3g}"), "block": FP8_BLOCK}
            facts |= {array: fp8_rounding(t, rows, rotation) for array, t in (("Q", q), ("K", k))}
            yield Case(name, trace, facts, variant)


def fp8_rounding(x: Tensor, rows: int, rotation: Tensor | None) -> dict[str, Any]:
    """Classify the rounding error of each element of x in e4m3. ``classes`` has one digit per element.

    0: the relative error is at most 1/16. 1: the relative error is larger. 2: the element is rounded to zero.
    3: the relative error is at most 1/16, but the absolute error is above :data:`FP8_LOUD`.
    """
    x = x if rotation is None else x @ rotation
    stored, scales = flash3_fp8.quantise(x, rows)
    values = stored * scales.repeat_interleave(rows, 0)
    lost = (values == 0) & (x != 0)
    coarse = (values - x).abs() > x.abs() / 16 * (1 + 1e-6)
    loud = ~coarse & ((values - x).abs() > FP8_LOUD)
    classes = torch.where(lost, 2, coarse.int() + 3 * loud.int())
    return {
        "classes": ["".join(map(str, row)) for row in classes.tolist()],
        "scales": numbers(scales[:, 0], 4),
        "largest": numbers(x.abs().amax(), 4),
        "coarse": int((classes == 1).sum()),
        "lost": int(lost.sum()),
        "loud": int(loud.sum()),
    }


SUMS_KEYS, SUMS_PROMOTE = 8192, 128
SUMS_CASES = {"one": None, "two": SUMS_PROMOTE}
"""Products after which the sum in the tensor core goes on in fp32."""


def sums_products() -> Tensor:
    """Return weights times values in e4m3, for one element of the output."""
    generator = torch.Generator().manual_seed(0)
    p, v = torch.rand(2, SUMS_KEYS, generator=generator, device="cpu")
    weights = flash3_fp8.round_to_e4m3(p * flash3_fp8.P_SCALE) / flash3_fp8.P_SCALE
    return weights.double() * flash3_fp8.round_to_e4m3(v + 0.5).double()


def sums() -> Iterator[Case]:
    """Yield the sum of FP8 products in the tensor core alone, and in two levels.

    An event is an instruction.
    """
    products = sums_products()
    exact = products.view(-1, flash3_fp8.INSTRUCTION).sum(1).cumsum(0)
    found = {}
    for name, promote in SUMS_CASES.items():
        states = flash3_fp8.sum_products(products, promote)
        added, register, total = torch.tensor(states, dtype=torch.float64, device="cpu").T
        done = torch.arange(1, len(states) + 1, device="cpu") * flash3_fp8.INSTRUCTION
        promoted = done % promote == 0 if promote else torch.zeros_like(done, dtype=torch.bool)
        errors = (torch.where(promoted, total, total + register) - exact).abs() / exact
        found[name] = added, register, total, errors
    for name, (added, register, total, errors) in found.items():
        facts = {
            "keys": SUMS_KEYS,
            "instruction": flash3_fp8.INSTRUCTION,
            "bits": flash3_fp8.SUM_BITS,
            "promote": SUMS_CASES[name],
            "added": numbers(added, 12),
            "register": numbers(register, 12),
            "total": numbers(total, 12),
            "errors": numbers(errors),
            "longest": max(one[3].max().item() for one in found.values()),
            "percent": f"{100 * errors[-1].item():#.2g}",
        }
        yield Case(name, Trace(events=[Event("tick", "sum")] * len(added)), facts)


UNIFIED_SCORES = [5.0, 6.5, 4.0, 6.0, 7.0, 5.5, 8.5, 6.0, 4.5, 7.5, 6.0, 5.0, 8.0, 6.5, 5.5, 7.0]
UNIFIED_SPIKE = 9.0
"""Score that leaves the bounds: exp(9 - 6) is not below exp(3), as in the paper's Figure 5."""

UNIFIED_SPIKE_AT, UNIFIED_PHI, UNIFIED_BOUNDS = 9, 6.0, (-3.0, 3.0)
UNIFIED_NUM_SPLITS, UNIFIED_BLOCK = 4, 2


def unified() -> Iterator[Case]:
    """Yield attention of one query to sixteen keys in four splits, by two methods.

    The methods are a running maximum and a unified maximum. In the variant "spike", one score exceeds the
    bounds of the unified maximum. In the variant "calm", no score does.
    """
    for variant in ("spike", "calm"):
        scores = list(UNIFIED_SCORES)
        if variant == "spike":
            scores[UNIFIED_SPIKE_AT] = UNIFIED_SPIKE
        q = torch.ones(1, 1, device="cpu")  # head_dim 1, so that scores are the keys
        k = torch.tensor(scores, device="cpu")[:, None]
        v = torch.arange(16.0, device="cpu")[:, None]
        options: dict[str, Any] = {"num_splits": UNIFIED_NUM_SPLITS, "block_m": 1, "block_n": UNIFIED_BLOCK}
        facts = {
            "scores": scores,
            "phi": UNIFIED_PHI,
            "bounds": list(UNIFIED_BOUNDS),
            "num_splits": UNIFIED_NUM_SPLITS,
        }
        trace = Trace()
        out, _ = flash_decoding.forward(q, k, v, Memory(trace=trace), **options)
        yield Case("running", trace, {**facts, "out": numbers(out[0])}, variant)
        trace = Trace()
        out, _, again = unified_max.forward(
            q, k, v, Memory(trace=trace), phi=UNIFIED_PHI, bounds=UNIFIED_BOUNDS, **options
        )
        yield Case("unified", trace, {**facts, "out": numbers(out[0]), "recomputed": len(again)}, variant)


POOL_SLOTS, POOL_PAGE_SIZE, POOL_REQUESTS = 15728, 16, 96
"""Room for LLaMA-13B's keys and values in 12 GB, at 800 KiB a token (PagedAttention, section 1)."""


def pool() -> Iterator[Case]:
    """Yield one workload in three memories of the same size.

    The first reserves a region for the longest possible sequence. The second reserves a region for a guessed
    length. The third allocates pages.
    """
    rooms: dict[str, reservation.Room] = {
        "longest": reservation.Contiguous(POOL_SLOTS, reservation.for_the_longest),
        "power": reservation.Contiguous(POOL_SLOTS, reservation.to_a_power_of_two),
        "pages": reservation.Pages(POOL_SLOTS, POOL_PAGE_SIZE),
    }
    for name, room in rooms.items():
        trace = Trace()
        served = reservation.serve(reservation.random_requests(POOL_REQUESTS), room, trace)
        facts = {**asdict(served), "slots": POOL_SLOTS, "page_size": POOL_PAGE_SIZE, "paged": name == "pages"}
        yield Case(name, trace, facts)


MASKS_SEQLEN, MASKS_HEAD_DIM, MASKS_BLOCK = 128, 8, 16
MASKS_SLOPE = 0.25
"""Slope of ALiBi."""


def _documents() -> MaskMod:
    starts = torch.tensor([0, 40, 48, 100], device="cpu")
    return (
        library.document((torch.arange(MASKS_SEQLEN, device="cpu")[:, None] >= starts).sum(1))
        & library.causal()
    )


MASKS: dict[str, Callable[[], MaskMod]] = {
    "causal": library.causal,
    "window": lambda: library.window(24, 0),
    "prefix": lambda: library.prefix_lm(40),
    "document": _documents,
    "dilated": lambda: library.dilated(8, 4),
    "alibi": library.causal,
}
"""Mask by variant. ALiBi hides nothing: it lowers scores with the distance, here under a causal mask."""


MASKS_TILES = {
    "S": Tile("Q K^T", "rows", "keys"),
    "biased": Tile("alibi(S)", "rows", "keys", name="S"),  # in the place of S, as are the next two
    "masked": Tile("mask(S)", "rows", "keys", name="S"),
    "P": Tile("exp(S - m)", "rows", "keys", name="S"),
    "l": Tile("l"),
    "O": Tile("O + P V"),
    "m": Tile("m"),
}


def masks_inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(
        3, MASKS_SEQLEN, MASKS_HEAD_DIM, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    return q, k, v


def attend_in_blocks(name: str, memory: Memory, in_lists: bool) -> Tensor:
    """Run FlashAttention-2 over the blocks in the lists of a block mask, or over all blocks.

    With ``in_lists``, empty blocks are skipped and only partial blocks are masked, as in the kernels.
    """
    q, k, v = masks_inputs()
    Q, K, V = memory.place("Q", q), memory.place("K", k), memory.place("V", v)
    result = memory.empty("O", MASKS_SEQLEN, MASKS_HEAD_DIM, like=q)
    mask = MASKS[name]()
    lists = library.create_block_mask(mask, None, None, MASKS_SEQLEN, MASKS_SEQLEN, BLOCK_SIZE=MASKS_BLOCK)
    partial = listed(lists.kv_num_blocks, lists.kv_indices)[0, 0].tolist()
    full = listed(lists.full_kv_num_blocks, lists.full_kv_indices)[0, 0].tolist()
    for i, rows in enumerate(blocks(MASKS_SEQLEN, MASKS_BLOCK)):
        with memory.sram(tiles=MASKS_TILES, rows=rows) as sram:
            q_i = sram.load(Q, rows)
            sram.start(m=lowest(len(rows), q), l=q.new_zeros(len(rows), 1), O=q.new_zeros(len(rows), V.cols))
            for j, keys in enumerate(blocks(MASKS_SEQLEN, MASKS_BLOCK)):
                if in_lists and not partial[i][j] and not full[i][j]:
                    sram.skip("S", rows, keys)
                    continue
                sram.move(keys=keys)
                k_j, v_j = sram.load(K, keys), sram.load(V, keys)
                sram.S = s = q_i @ k_j.T * MASKS_HEAD_DIM**-0.5
                places = torch.tensor(rows, device="cpu")[:, None], torch.tensor(keys, device="cpu")
                if name == "alibi":
                    sram.biased = s = s - MASKS_SLOPE * (places[0] - places[1]).abs()
                if partial[i][j] or not in_lists:
                    seen = torch.as_tensor(mask(0, 0, *places), device="cpu")
                    sram.masked = s = s.masked_fill(~seen, -torch.inf)
                m_new = torch.maximum(sram.m, s.amax(1, keepdim=True))
                sram.P = torch.exp(s - m_new)
                correction = torch.exp(sram.m - m_new)
                sram.l = sram.l * correction + row_sum(sram.P)
                sram.O = sram.O * correction + sram.P @ v_j
                sram.m = m_new
            sram.store(result, sram.O / sram.l, rows)
    return result.tensor


def masks() -> Iterator[Case]:
    """Yield attention with masks, block by block.

    Either every block is computed and masked, or only the blocks that a block mask lists are computed.
    """
    for variant in MASKS:
        for name in ("every", "lists"):
            trace = Trace()
            attend_in_blocks(variant, Memory(trace=trace), in_lists=name == "lists")
            yield Case(name, trace, {"seqlen": MASKS_SEQLEN, "block": MASKS_BLOCK}, variant)


STORIES: dict[str, Callable[[], Iterator[Case]]] = {
    story.__name__: story
    for story in (softmax, matmul, chain, warps, backward, turns, rounding, fp8, sums, unified, pool, masks)
}
"""Stories by name, in the order of the page."""


@functools.cache
def recorded(name: str) -> tuple[Case, ...]:
    """Return the cases of a story. The first call in a process runs them, and later calls reuse them."""
    return tuple(STORIES[name]())


def catalogue() -> list[dict[str, Any]]:
    """Return the name and the recorded cases of every story, as JSON data for the page."""
    return [{"name": name, "cases": [case.as_record() for case in recorded(name)]} for name in STORIES]
