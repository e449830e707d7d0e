"""Conversion of a call's tensors to the arguments of a product's kernel and its epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.linear_epilogue import (
    PLAIN,
    ROTARY,
    SWIGLU,
    EpilogueCacheStrides,
    EpilogueSizes,
    EpilogueStrides,
    EpilogueVariant,
    ProductPointers,
)
from flashtile.problems import linear as kinds
from flashtile.problems.linear import LinearProblem

EPILOGUES = {kinds.PLAIN: PLAIN.value, kinds.SWIGLU: SWIGLU.value, kinds.QKV: ROTARY.value}


def epilogue_variant(problem: LinearProblem, norm: bool | None = None) -> EpilogueVariant:
    """Return the constants of the epilogue.

    ``norm``: whether the epilogue applies RMSNorm's factor. If None, this is ``problem.norm``.
    """
    heads = problem.heads
    fields: dict[str, Any] = {}
    if heads is not None:
        fields = {
            "HEAD_DIM": heads.head_dim,
            "ROTARY_DIM": heads.rotary_dim,
            "INTERLEAVED": heads.rotary_interleaved,
            "PAGE_SIZE": heads.page_size,
            "HAS_SLOTS": heads.table_width == 0,
        }
    return EpilogueVariant(
        EPILOGUE=EPILOGUES[problem.epilogue],
        NORM=problem.norm if norm is None else norm,
        BIAS=problem.bias,
        RESIDUAL=problem.residual,
        CHANNEL_SCALES=problem.scales == "channel",
        X_SCALES=problem.x_scale,
        NEXT_NORM=problem.next_norm,
        **fields,
    )


class NextNorm(NamedTuple):
    """Results of a product that the following norm uses. Each is None if no norm follows."""

    scaled: Tensor | None = None
    squares: Tensor | None = None
    factor: Tensor | None = None


NOTHING = NextNorm()


def new_next_norm(problem: LinearProblem, y: Tensor, parts: int) -> NextNorm:
    """Allocate the tensors for the norm that follows. ``parts`` is the number of float32 sums of squares."""
    if not problem.next_norm:
        return NOTHING
    squares, factor = (y.new_empty(size, dtype=torch.float32) for size in (parts, problem.M))
    return NextNorm(torch.empty_like(y), squares, factor)


def product_pointers(
    x: Any,
    weight: Any,
    y: Any,
    given: Any,
    caches: tuple[Tensor, ...] = (),
    following: NextNorm = NOTHING,
    block_scale: Any = None,
    partial: Any = None,
    arrived: Any = None,
) -> ProductPointers:
    """Return the :class:`ProductPointers` of a launch.

    ``given`` is a ``LinearTensors``, ``BeforeNormTensors`` or ``QkvTensors``.
    """
    k_cache, v_cache = caches or (None, None)
    return ProductPointers(
        x,
        weight,
        y,
        given.norm_weight,
        block_scale,
        partial,
        arrived,
        given.bias,
        getattr(given, "residual", None),
        given.weight_scale,
        getattr(given, "rotary_cos", None),
        getattr(given, "rotary_sin", None),
        getattr(given, "positions", None),
        getattr(given, "slot_mapping", None),
        getattr(given, "block_table", None),
        k_cache,
        v_cache,
        given.x_scale,
        getattr(given, "next_norm_weight", None),
        *following,
    )


def epilogue_scalars(
    problem: LinearProblem, given: Any, caches: tuple[Tensor, ...]
) -> tuple[int, EpilogueStrides, EpilogueCacheStrides, EpilogueSizes]:
    """Return an epilogue's scalars: (places, strides of y and residual, strides of the caches, sizes).

    ``places`` is the number of output columns, or of pairs of columns that the epilogue rotates. The kernel
    takes these scalars after the scalars of the product.
    """
    heads, residual = problem.heads, getattr(given, "residual", None)
    strides = [stride for cache in caches for stride in cache.stride()[:3]] or [0] * 6
    return (
        problem.places,
        EpilogueStrides(problem.out_columns, 0 if residual is None else residual.stride(0)),
        EpilogueCacheStrides(*strides),
        EpilogueSizes(
            problem.M,
            0 if heads is None else heads.num_heads_q,
            0 if heads is None else heads.num_heads_kv,
            0 if heads is None else heads.rotary_rows,
            0 if heads is None else heads.num_blocks,
            0 if heads is None else heads.table_width,
            problem.next_norm_eps,
        ),
    )


def new_output(problem: LinearProblem, x: Tensor) -> Tensor:
    if problem.heads is not None:
        return x.new_empty(problem.M, problem.heads.num_heads_q, problem.heads.head_dim)
    return x.new_empty(problem.M, problem.places)
