"""A step of the Hopper backward: the five products of 64 keys with a block of query rows."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.hopper.backward.scores import probabilities, row_of, score_gradients
from flashtile.backends.hopper.columns import product_of_rows
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS, accumulator_layout, left_operand_layout
from flashtile.backends.hopper.inline_asm import pin_16_bit, to_16_bit
from flashtile.backends.hopper.modifiers import bias as bias_tiles
from flashtile.backends.hopper.modifiers.dropout import drop, random_bits


class StepState(NamedTuple):
    """Registers that one step passes to the next."""

    dk: Any
    dv: Any
    """dk and dv are the gradients of a warpgroup's keys, summed over the steps so far."""
    start: Any
    """-lse of the step's rows, the initial value of the accumulator of S^T."""


@gluon.jit
def dq_product(C: gl.constexpr, W: gl.constexpr, ds, k):
    """Start the product dS K for warpgroup W's half of dQ, and return its accumulator.

    With BLOCK_M 64 the half has half of the columns. With BLOCK_M 128 it has 64 of the rows. The product is
    asynchronous: wait for it before the accumulator is used.
    """
    COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == WARPGROUP_ROWS else C.BLOCK_D
    zero = gl.full([WARPGROUP_ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS))
    ds_q = ds if C.STORES_DS else ds.permute((1, 0))
    if C.BLOCK_M == WARPGROUP_ROWS:
        half = k.slice(W * (C.BLOCK_D // 2), C.BLOCK_D // 2, 1)
        return warpgroup_mma(ds_q, half, zero, use_acc=False, is_async=True)
    else:
        rows = ds_q.slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
        return warpgroup_mma(rows, k, zero, use_acc=False, is_async=True)


@gluon.jit
def in_register_order(x):
    """Reorder an accumulator [64, N] to [N / 4, 256]: each row has one pair of registers of every thread.

    In wgmma's accumulator, row 16 w + 8 a + r and column 8 j + 2 t + b is register (j, a, b) of thread
    (w, r, t). In the new order, a store needs one address per thread and has no bank conflicts.
    ``dq_accum`` keeps this order, which ``dq_accum.convert_part`` undoes.
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute((3, 1, 0, 2, 4, 5))
    return x.reshape([N // 4, 256])


@gluon.jit
def pass_dq(W: gl.constexpr, shared, dq, i):
    """Pass warpgroup W's half of dQ of step ``i`` to the warp that adds it to ``dq_accum``."""
    mbarrier.wait(shared.dq_empty.index(W), (i & 1) ^ 1)
    shared.dq.index(W).store(in_register_order(dq))
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(W), count=1)


@gluon.jit
def step(
    C: gl.constexpr, W: gl.constexpr, FIRST: gl.constexpr, CUT: gl.constexpr, i, m, more, work, head, state,
    shared, scalars,
):  # fmt: skip
    """Compute step ``i``, for the rows of block ``m``, except its dQ. Also compute dQ of the step before.

    FIRST: this is the first step of a work tile, so there is no step before. CUT: the mask may hide scores.
    ``more`` is 0 in the last step of a work tile, else 1. Returns the new state, whose ``start`` is -lse of
    the rows of step ``i + more``.
    """
    dtype: gl.constexpr = shared.k.dtype
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    ds_operand: gl.constexpr = left_operand_layout(accumulator_layout(C.BLOCK_D))
    p_operand: gl.constexpr = left_operand_layout(accumulator_layout(C.BLOCK_DV))
    q, do, modifiers, numbers = shared.q, shared.do, head.modifiers, scalars.numbers
    dk, dv, start = state
    # The index is always 0, but to the compiler it depends on the step. Otherwise the compiler would keep the
    # matrix descriptors of these tiles in 32 registers of every thread.
    k = shared.k.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_D])
    v = shared.v.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_DV])
    my_k = k.slice(W * ROWS, ROWS, 0)
    my_v = v.slice(W * ROWS, ROWS, 0)
    # One zero for each row. The compiler must not know that they are 0. If all accumulators were copies of
    # one register, it would copy them after the fence that precedes the product, which costs a wait.
    zeros = (gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)) + 1).to(gl.float32) * numbers.zero

    slot = q.wait(i)
    q_tile = q.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_D])
    do_tile = do.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_DV])
    scores = product_of_rows(my_k, q_tile, start, C.HEAD_DIM, not C.HAS_SCORE_MOD)
    if not FIRST:
        before = i - 1
        mbarrier.wait(shared.ds_full.index(before & 1), (before >> 1) & 1)
        dq = dq_product(C, W, shared.ds.index(before & 1), k)
    bits = 0
    if C.HAS_DROPOUT:
        bits = random_bits(modifiers.dropout, m * C.BLOCK_M, C.BLOCK_M, True, s_layout)
    added = 0
    if C.HAS_BIAS:
        added = bias_tiles.read_keys(C, W, modifiers.bias, i, s_layout)
    scores = warpgroup_mma_wait(0 if FIRST else 1, deps=[scores])
    p, weights = probabilities(C, W, CUT, scores, added, m, slot, work, head, shared, scalars)
    weights = to_16_bit(weights, dtype)
    p = to_16_bit(p, dtype)
    if C.HAS_DROPOUT:
        p = drop(p, bits, modifiers.dropout, True)
    do.wait(i)
    dp_start = row_of(shared.neg_delta.index(slot).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
    p = pin_16_bit(p)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=[dq])
    if C.HAS_BIAS:  # noqa: SIM102 - a constexpr condition needs an if of its own
        if i > 0:
            bias_tiles.release_keys(modifiers.bias, i - 1)
    dp = product_of_rows(my_v, do_tile, dp_start, C.HEAD_DIM_V, not C.HAS_DROPOUT)
    dv = warpgroup_mma(gl.convert_layout(p, p_operand), do_tile, dv, is_async=True)
    if not FIRST:
        pass_dq(W, shared, dq, i - 1)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = score_gradients(C, p, weights, dp, bits, slot, modifiers, shared, numbers)
    if C.STORES_DS:
        shared.ds.index(i & 1).slice(W * ROWS, ROWS, 1).permute((1, 0)).store(ds)
    else:
        shared.ds.index(i & 1).slice(W * ROWS, ROWS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(i & 1), count=1)
    dk = warpgroup_mma(gl.convert_layout(ds, ds_operand), q_tile, dk, is_async=True)
    # -lse of the next step, loaded during dK. The last step loads its own -lse again.
    start = row_of(shared.neg_lse.index(q.wait(i + more)).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    do.release(i)
    q.release(i)
    return StepState(dk, dv, start)
