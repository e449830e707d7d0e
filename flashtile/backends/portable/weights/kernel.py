"""Attention weights from q, k and lse: all of them, their sums over rows, or the largest of each row (its
*top*).

With lse known, a weight needs no other weight of its row: P = exp(S - lse), as in the backward pass. So one
program owns a tile and walks the tiles of the other sequence, as in the forward pass::

    form      a program owns          walks          does with each tile of P
    "full"    BLOCK_M rows            keys           stores it
    "top"     BLOCK_M rows            keys           merges it into the best of each row, stored at the end
    "columns" BLOCK_N keys            rows           adds it to the sums over rows, stored at the end

The forms share one kernel, because all but the last line of their work is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.config import KernelConfig, padded
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import LOG2_E, load_tile, row_of_head
from flashtile.backends.portable import configure_forward
from flashtile.backends.portable.attention.arguments import AttentionCall, attention_pointers
from flashtile.backends.portable.attention.functions import FunctionPointers, captured_of
from flashtile.backends.portable.attention.launch import attention_kernel, optional_pointers
from flashtile.backends.portable.attention.steps import (
    block_at,
    find_sequence,
    keys_of,
    modify_scores,
    own_rows,
    queries_of,
    reached_keys,
    reaching_rows,
    score_indices,
    visible_scores,
    walk,
    walked_block,
)
from flashtile.backends.portable.config import Config
from flashtile.backends.portable.tiles import row_block
from flashtile.problems.attention import WeightsProblem

WeightsPointers = attention_pointers("WeightsPointers", "q k lse weights indices", __name__)


@kernel(do_not_specialize=("pointers", "lengths"))
def weights_kernel(pointers, strides, lengths, numbers, C: tl.constexpr):
    """Compute attention weights in the form C.FORM. Grid: (blocks of rows * heads * batch,).

    With FORM "columns", the weights are summed over rows, and the grid is (blocks of keys * heads * batch,).
    The lists of a block mask then hold the row blocks of each key block. With other forms, they hold the key
    blocks of each row block.

    q and k are laid out as for the forward kernel. lse, weights and indices are contiguous. Elements outside
    of the visited blocks are not written: the caller fills weights with 0 and indices with -1.
    """
    call = AttentionCall(pointers, strides, lengths, numbers, 0, 0)  # no dropout: weights are those before it
    if C.FORM == "columns":
        column_sums(call, C)
    else:
        row_weights(call, C)


@triton.jit
def row_weights(call, C: tl.constexpr):
    """Compute all weights of BLOCK_M rows or, with FORM "top", the largest weights of each row.

    Grid: (blocks of rows * heads * batch,).
    """
    pointers, lengths = call.pointers, call.lengths
    sequence, head, head_kv, start = own_rows(call, C)
    if start < sequence.len_q:
        q = queries_of(sequence, head, call)
        k = keys_of(sequence, head_kv, call)
        block = block_at(start, sequence, head, call, C)
        row, _ = first_places(sequence, head, call, C)
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(pointers.lse + row, start + tl.arange(0, C.BLOCK_M), sequence.len_q)
        BLOCK_M: tl.constexpr = C.BLOCK_M  # Triton does not accept a field of C in a shape
        COLUMNS: tl.constexpr = C.BLOCK_TOP if C.FORM == "top" else 1  # a placeholder, as walk needs a state
        best = tl.full([BLOCK_M, COLUMNS], -1, tl.int64)
        # A head's weights may have more than 2^31 elements, so their address has 64 bits.
        of_head = sequence.b.to(tl.int64) * lengths.num_heads_q + head
        weights = pointers.weights + of_head * lengths.seqlen_q * lengths.seqlen_k
        reached = reached_keys(start, sequence, call, C)
        inputs = (q_tile, shifts, k, sequence, weights)
        best = walk(weigh_keys, best, inputs, reached, block, call, False, C)
        if C.FORM == "top":
            rows = start + tl.arange(0, C.BLOCK_M)[:, None]
            columns = tl.arange(0, C.BLOCK_TOP)[None, :]
            place = (row + rows) * C.TOP + columns
            inside = (rows < sequence.len_q) & (columns < C.TOP)
            # join_top has packed a weight and its key into one integer.
            values = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            keys = 0x7FFFFFFF - (best & 0x7FFFFFFF)
            # A row that sees fewer than TOP keys has empty entries: weight 0, key -1.
            tl.store(pointers.weights + place, tl.where(best < 0, 0.0, values), mask=inside)
            tl.store(pointers.indices + place, tl.where(best < 0, -1, keys), mask=inside)


@triton.jit
def weigh_keys(
    best, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Compute the weights of key blocks ``first`` to ``last`` (exclusive) for the rows of ``block``.

    With FORM "top", the weights are merged into ``best``, the largest weights of each row so far. Otherwise
    they are written to the last of ``inputs``: the weights [seqlen_q, seqlen_k] of this sequence and head.
    Returns ``best``.
    """
    q_tile, shifts, k, sequence, weights = inputs
    for n in range(first, last):
        start = walked_block(listed, n, k.length, C.BLOCK_N, C) * C.BLOCK_N
        # Every tile is masked (constants_of), so loads are as well. Not measured against runs without a mask.
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        at = score_indices(
            block, block.start + tl.arange(0, C.BLOCK_M), start + tl.arange(0, C.BLOCK_N), False
        )
        p, seen = probabilities(scores, shifts, at, sequence, block, call, C)
        if C.FORM == "top":
            best = join_top(best, p, seen, start, C)
        else:
            rows = (block.start + tl.arange(0, C.BLOCK_M)).to(tl.int64)[:, None]
            keys = start + tl.arange(0, C.BLOCK_N)[None, :]
            place = weights + rows * call.lengths.seqlen_k + keys
            inside = (rows < sequence.len_q) & (keys < k.length)
            tl.store(place, p.to(weights.dtype.element_ty), mask=inside)
    return best


@triton.jit
def probabilities(scores, shifts, at, sequence, block, call, C: tl.constexpr):
    """Return (probabilities, visible), both [BLOCK_M, BLOCK_N], for the raw products ``scores``.

    ``visible`` says whether the row sees the key. The probabilities of other keys are 0.
    """
    if C.SCALED_SCORES:
        scores, _ = modify_scores(scores, at, block, call, C)
    else:
        scores = scores * call.numbers.scale_log2
    # A score of -inf counts as hidden: its weight is 0 with any lse, and "top" must not report its key.
    seen = visible_scores(at, call, C) & (scores != -float("inf"))
    seen = seen & (at.rows < sequence.len_q) & (at.keys < sequence.len_k)
    return tl.where(seen, tl.exp2(scores - shifts[:, None]), 0.0), seen


@triton.jit
def join_top(best, p, seen, key_start, C: tl.constexpr):
    """Merge a tile's weights ``p`` into ``best`` [BLOCK_M, BLOCK_TOP], each row's largest weights so far.

    An entry of ``best`` is an int64. Its upper half holds the bits of a weight, which sort as integers in the
    same order as the weights. Its lower half is 0x7FFFFFFF minus the key, so the first key wins among equal
    weights. An empty entry is -1.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_TOP: tl.constexpr = C.BLOCK_TOP
    keys = key_start + tl.arange(0, C.BLOCK_N)
    # One integer for weight and key, because tl.topk sorts single numbers. Bits of floats that are not
    # negative are in the order of the floats.
    bits = p.to(tl.int32, bitcast=True).to(tl.int64)
    own = tl.where(seen, (bits << 32) | (0x7FFFFFFF - keys).to(tl.int64)[None, :], -1)
    if C.BLOCK_N < C.BLOCK_TOP:
        # tl.join needs equal shapes: the keys come first, then empty entries.
        TIMES: tl.constexpr = BLOCK_TOP // C.BLOCK_N
        first = (tl.arange(0, TIMES) == 0)[None, :, None]
        own = tl.reshape(tl.where(first, own[:, None, :], -1), [BLOCK_M, BLOCK_TOP])
    elif C.BLOCK_N > C.BLOCK_TOP:  # to the shape of best
        own = tl.topk(own, BLOCK_TOP)
    both = tl.reshape(tl.join(best, own), [BLOCK_M, 2 * BLOCK_TOP])
    return tl.topk(both, BLOCK_TOP)


@triton.jit
def column_sums(call, C: tl.constexpr):
    """Sum the weights of BLOCK_N keys over all rows. Grid: (blocks of keys * heads * batch,)."""
    pointers, lengths = call.pointers, call.lengths
    # Each query head has weights of its own, so programs count query heads, unlike those of dk and dv
    # (own_keys).
    b, head, start = row_block(lengths.seqlen_k, lengths.num_heads_q, False, C.BLOCK_N)
    sequence = find_sequence(b, call, C)
    if start < sequence.len_k:
        q = queries_of(sequence, head, call)
        k = keys_of(sequence, head // lengths.group_size, call)
        block = block_at(start, sequence, head, call, C)
        row, key = first_places(sequence, head, call, C)
        k_tile = load_tile(k, start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        BLOCK_N: tl.constexpr = C.BLOCK_N  # Triton does not accept a field of C in a shape
        sums = tl.zeros([BLOCK_N], tl.float32)
        reaching = reaching_rows(start, sequence, call, C)
        inputs = (q, k_tile, pointers.lse + row, sequence)
        sums = walk(sum_rows, sums, inputs, reaching, block, call, True, C)
        own = start + tl.arange(0, C.BLOCK_N)
        tl.store(pointers.weights + key + own, sums, mask=own < sequence.len_k)


@triton.jit
def sum_rows(
    sums, inputs, first, last, listed, block, call, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add the weights of row blocks ``first`` to ``last`` (exclusive) to ``sums`` [BLOCK_N]."""
    q, k_tile, lse, sequence = inputs
    for m in range(first, last):
        start = walked_block(listed, m, q.length, C.BLOCK_M, C) * C.BLOCK_M
        q_tile = load_tile(q, start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D, True, C.WIDE)
        shifts = load_shifts(lse, start + tl.arange(0, C.BLOCK_M), q.length)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        at = score_indices(
            block, start + tl.arange(0, C.BLOCK_M), block.start + tl.arange(0, C.BLOCK_N), False
        )
        p, _ = probabilities(scores, shifts, at, sequence, block, call, C)
        sums += tl.sum(p, 0)  # one program sums all rows of its keys: the order is the same in every run
    return sums


@triton.jit
def load_shifts(lse, rows, length):
    """Load the lse of ``rows``, in log2 units, to subtract it from the scores.

    The lse of a row that sees no key is replaced by inf, so that its probabilities are 0.
    """
    shifts = tl.load(lse + rows, mask=rows < length, other=-float("inf")) * LOG2_E
    return tl.where(shifts == -float("inf"), float("inf"), shifts)


@triton.jit
def first_places(sequence, head, call, C: tl.constexpr):
    """Return (index of the first row, index of the first key) of this sequence and head.

    The indices count the elements of a contiguous tensor (batch, heads, seqlen), or (heads, total) with
    VARLEN.
    """
    lengths, b = call.lengths, sequence.b
    row = row_of_head(
        b, head, sequence.start_q, lengths.num_heads_q, lengths.seqlen_q, lengths.total_q, C.VARLEN
    )
    key = row_of_head(
        b, head, sequence.start_k, lengths.num_heads_q, lengths.seqlen_k, lengths.total_k, C.VARLEN
    )
    return row, key


KEYS_A_THREAD = 16
"""Maximum number of 64-bit entries per thread in a tile whose rows are sorted to find the largest weights.

Not measured against others."""


@dataclass(frozen=True)
class WeightsConfig:
    tile: KernelConfig
    precision: str


def choose(problem: WeightsProblem) -> WeightsConfig:
    return of_forward(problem, configure_forward(problem))


def of_forward(problem: WeightsProblem, config: Config) -> WeightsConfig:
    """Return the weights kernel's configuration, derived from the forward kernel's ``config``."""
    tile = config.forward
    if problem.form == "top":
        keys = max(tile.BLOCK_N, padded(problem.top)) if problem.mods is None else tile.BLOCK_N
        # Fewer rows keep the entries in registers; 16 are the least of a product.
        most = max(16, KEYS_A_THREAD * 32 * tile.num_warps // max(keys, padded(problem.top)))
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, most), BLOCK_N=keys)
    return WeightsConfig(tile, config.precision)


def constants_of(problem: WeightsProblem) -> dict[str, Any]:
    """Return the constants of the weights kernel that the forward kernel lacks or sets differently.

    The weights kernel applies the mask to every block, even to blocks that lie within the window.
    """
    block_top = padded(problem.top) if problem.top else 0
    return {"FORM": problem.form, "TOP": problem.top, "BLOCK_TOP": block_top, "MASKS_EVERY_BLOCK": True}


class WeightsLaunch:
    """The launch ``(q, k, lse, extras) -> (weights, indices)`` for tensors of one signature."""

    def __init__(self, problem: WeightsProblem, config: WeightsConfig) -> None:
        self._problem, self._config = problem, config
        tile = config.tile
        self._by_keys = problem.form == "columns"
        blocks = (
            triton.cdiv(problem.seqlen_k, tile.BLOCK_N)
            if self._by_keys
            else triton.cdiv(problem.seqlen_q, tile.BLOCK_M)
        )
        self._programs = blocks * problem.num_heads_q * problem.batch
        self._kernel: CachedLaunch | None = None
        self._functions: FunctionPointers | None = None

    def __call__(self, q: Tensor, k: Tensor, lse: Tensor, extras: Any) -> tuple[Tensor, Tensor | None]:
        problem = self._problem
        weights = q.new_zeros(problem.weights_shape, dtype=problem.weights_dtype)
        indices = None
        if problem.form == "top":
            indices = q.new_full(problem.weights_shape, -1, dtype=torch.int64)
        if self._programs == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
            return weights, indices
        lse = lse.contiguous()
        kernel = self._kernel
        if kernel is None:
            kernel = self._kernel = self._prepare(q, k, extras)
        if self._functions is None:
            optional = optional_pointers(extras)
        else:
            captured = captured_of(extras)  # kept alive until the launch
            optional = self._functions(kernel, extras, captured, owns_keys=self._by_keys)
        kernel(q.device, q, k, lse, weights, indices, *optional)
        return weights, indices

    def _prepare(self, q: Tensor, k: Tensor, extras: Any) -> CachedLaunch:
        problem, config = self._problem, self._config
        if problem.mods is not None:
            self._functions = FunctionPointers(problem, extras)
        return attention_kernel(
            weights_kernel, WeightsPointers, self._programs, config.tile, problem, config.precision,
            (q, k, k),  # k also stands for v, which the kernel does not have
            extras, owns_keys=self._by_keys, **constants_of(problem),
        )  # fmt: skip
