"""Products of a mixture of experts: each row of x with the weight of its expert.

The rows are sorted by expert, and each program multiplies a tile of one expert's rows by the flat product of
:mod:`flashtile.backends.portable.linear.kernel`. How many rows an expert has is known on the device only, so
the grid has room for every distribution of the rows, and programs without rows end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashtile.backends.common.cached_launch import CachedLaunch, Launched
from flashtile.backends.common.deferred import triton
from flashtile.backends.common.device import Target
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.linear_epilogue import PLAIN, EpilogueVariant, ProductDepth
from flashtile.backends.portable.config import family
from flashtile.backends.portable.fp8 import is_native
from flashtile.backends.portable.linear.config import DEFAULTS, MAX_FLAT_ROWS
from flashtile.backends.portable.linear.kernel import SCALE_BLOCK, ProductVariant, multiply_flat
from flashtile.hardware.linear_table import FLAT
from flashtile.problems import linear as problem

MIN_ROWS = 8
WIDE_TILE = (128, 64, 8, 4)
"""(BLOCK_N, BLOCK_K, num_warps, num_stages) for experts with many rows, on GPUs with enough shared memory."""


class GroupedPointers(NamedTuple):
    """Tensors of a grouped product."""

    x: Any
    w: Any
    """(experts * N, K)"""
    y: Any
    bias: Any
    """(experts * N,), or None."""
    scales: Any
    """float32 (experts * N,), a scale for each row of w, or None."""
    block_scale: Any
    """float32, for each expert a scale for each block of 128 x 128 of its weight, or None."""
    rows: Any
    """int64: row of x for each sorted row if GATHER, else its row of y. The other tensor has sorted rows."""
    ends: Any
    """int32, for each expert the end of its range of sorted rows."""


class GroupedSizes(NamedTuple):
    """Integers of a grouped product. The kernel is not specialized on them."""

    N: Any
    rows: Any
    experts: Any
    scale_stride: Any
    """Row stride of block_scale."""


@kernel(do_not_specialize=("sizes",))
def grouped_kernel(
    pointers, depth, sizes, C: tl.constexpr, E: tl.constexpr, GATHER: tl.constexpr, EXPERTS: tl.constexpr
):
    """Multiply sorted rows by the weights of their experts.

    Grid: (blocks of rows * tiles of W,); tiles vary fastest. EXPERTS is a power of two of at least
    ``sizes.experts``.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    tiles = tl.cdiv(sizes.N, BLOCK_N)
    block = tl.program_id(0) // tiles
    expert = tl.arange(0, EXPERTS)
    exists = expert < sizes.experts
    end = tl.load(pointers.ends + expert, mask=exists, other=0)
    begin = tl.load(pointers.ends + expert - 1, mask=exists & (expert > 0), other=0)
    blocks = tl.where(exists, tl.cdiv(end - begin, BLOCK_M), 0)
    after = tl.cumsum(blocks, 0)
    before = after - blocks
    if block < tl.sum(blocks, 0):
        mine = (before <= block) & (block < after)
        number = tl.sum(tl.where(mine, expert, 0), 0)
        stop = tl.sum(tl.where(mine, end, 0), 0)
        start = tl.sum(tl.where(mine, begin + (block - before) * BLOCK_M, 0), 0)
        m = start + tl.arange(0, BLOCK_M)
        inside = m < stop
        row = tl.load(pointers.rows + m, mask=inside, other=0).to(tl.int32)
        x_row = tl.where(inside, row if GATHER else m, sizes.rows)  # multiply_flat masks row sizes.rows
        n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        in_tile = n < sizes.N
        w_row = number * sizes.N + n
        last = tl.cdiv(depth.K, C.BLOCK_K)
        # Blocks of scales begin with an expert's first row, as if all experts had whole blocks of rows.
        missing = number * (tl.cdiv(sizes.N, SCALE_BLOCK) * SCALE_BLOCK - sizes.N)
        sums, _ = multiply_flat(
            w_row, in_tile, x_row, 0, last, pointers, depth, sizes, sizes.rows, C, E, missing
        )
        if E.CHANNEL_SCALES:
            sums *= tl.load(pointers.scales + w_row, mask=in_tile, other=0.0)[:, None]
        if E.BIAS:
            sums += tl.load(pointers.bias + w_row, mask=in_tile, other=0.0).to(tl.float32)[:, None]
        y_row = m if GATHER else row
        y = pointers.y + y_row.to(tl.int64)[None, :] * sizes.N + n[:, None]
        tl.store(y, sums.to(y.dtype.element_ty), mask=in_tile[:, None] & inside[None, :])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    ends: Tensor,
    gather: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts.

    Args:
        x: float16 or bfloat16. (tokens, K) if ``gather``, else (sorted rows, K).
        weight: (experts, N, K), contiguous, in the dtype of x or in e4m3.
        bias: (experts, N) in the dtype of x, or None.
        rows: (sorted rows,) int64: the row of x of each sorted row if ``gather``, else its row of the result.
        ends: (experts,) int32, the end of each expert's range of sorted rows.
        gather: True: rows of x are gathered, and the result is sorted. False: x is sorted, and the rows of
            the result are scattered.
        scale: float32, contiguous, with a weight in e4m3: (experts, N) for a scale for each row, or
            (experts, N / 128, K / 128), rounded up, for a scale for each block.

    Returns:
        (sorted rows, N) in the dtype of x.
    """
    experts, N, K = weight.shape
    y = x.new_empty(len(rows), N)
    if len(rows) == 0 or isinstance(x, FakeTensor):
        return y
    scales = 0 if scale is None else scale.dim() - 1
    variant, num_warps = _variant(x.device, len(rows), experts, K, scales)
    # Each expert with rows may have one block that is not full.
    blocks = len(rows) // variant.BLOCK_M + min(experts, len(rows))
    by_row, by_block = (scale if scales == dims else None for dims in (1, 2))
    w = weight.view(torch.uint8) if variant.E4M3_BITS else weight
    pointers = GroupedPointers(x, w, y, bias, by_row, by_block, rows, ends)
    depth = ProductDepth(K, x.stride(0), K)
    sizes = GroupedSizes(N, len(rows), experts, triton.cdiv(K, problem.SCALE_BLOCK))
    grouped_kernel[(blocks * triton.cdiv(N, variant.BLOCK_N),)](
        pointers, depth, sizes, variant, _epilogue(bias is not None, scales), gather,
        triton.next_power_of_2(experts), num_warps=num_warps,
    )  # fmt: skip
    return y


def grouped_ahead(
    device: torch.device | Target,
    dtype: torch.dtype,
    shape: Sequence[int],
    bias: bool,
    gather: bool,
    scales: int = 0,
) -> list[Launched]:
    """Return the launches of all kernels of :func:`grouped_linear` for a weight, to compile them ahead.

    Args:
        dtype: dtype of x.
        shape: (experts, N, K) of the weight.
        scales: with a weight in e4m3, 1 for scales of rows and 2 for scales of blocks; else 0.
    """
    experts, N, K = shape
    x, rows, ends, scale = (
        torch.empty(1, K, dtype=kind, device="meta")
        for kind in (dtype, torch.int64, torch.int32, torch.float32)
    )
    scalars = ProductDepth(K, K, K), GroupedSizes(N, 1, experts, triton.cdiv(K, problem.SCALE_BLOCK))
    found = []
    for mean_rows in (8, 16, 32, 64):
        variant, num_warps = _variant(device, mean_rows * experts, experts, K, scales)
        w = x.to(torch.uint8 if variant.E4M3_BITS else torch.float8_e4m3fn) if scales else x
        of_rows, of_blocks = (scale if scales == dims else None for dims in (1, 2))
        tensors = x, w, x, x if bias else None, of_rows, of_blocks, rows, ends
        constants = variant, _epilogue(bias, scales), gather, triton.next_power_of_2(experts)
        options: dict[str, Any] = {"pointers": GroupedPointers, "num_warps": num_warps}
        found.append((CachedLaunch(grouped_kernel, 1, scalars, constants, None, **options), tensors))
    return found


def _epilogue(bias: bool, scales: int) -> EpilogueVariant:
    return EpilogueVariant(PLAIN.value, NORM=False, BIAS=bias, RESIDUAL=False, CHANNEL_SCALES=scales == 1)


def _variant(
    device: torch.device | Target, rows: int, experts: int, K: int, scales: int
) -> tuple[ProductVariant, int]:
    """Return (constants, number of warps). BLOCK_M is an expert's mean rows, rounded up, or 64."""
    block_m = min(max(triton.next_power_of_2(triton.cdiv(rows, experts)), MIN_ROWS), MAX_FLAT_ROWS)
    name = family(device)
    wide = block_m == MAX_FLAT_ROWS and name != "other"
    block_n, block_k, num_warps, stages = WIDE_TILE if wide else DEFAULTS[name, FLAT]
    variant = ProductVariant(
        DOT=True, HALVES=1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, SPLIT=False,
        EVEN_K=K % block_k == 0, BLOCK_SCALES=scales == 2, E4M3_BITS=scales > 0 and not is_native(device),
        DEPENDENT=False, AHEAD=0, UNIT=1,
    )  # fmt: skip
    return variant, num_warps
