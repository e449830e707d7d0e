"""FP8 on the CPU: FlashAttention-3's forward (Shah et al. 2024, arXiv:2407.08608, section 3.3) in torch.

Products multiply e4m3 values and sum in float32. Probabilities are multiplied by 2**8 and rounded to e4m3.

If each block of v has its own scale, the accumulator is stored divided by a *unit*. P of a block is then
multiplied by the block's scale divided by the unit. The unit is normally the scale of the current block, so
that this factor is 1. If that scale is far below the largest one so far, the unit is larger
(``LARGEST_RATIO``).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu import reason_against, with_exact_products
from flashtile.backends.cpu.parts import spans
from flashtile.problems.attention import OptionalTensors
from flashtile.problems.common import LN_2, LOG2_E
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, QuantizeProblem, Scales
from flashtile.problems.fp8_layout import (
    E4M3,
    KEY_BLOCK,
    LARGEST_RATIO,
    P_EXPONENT,
    QUERY_BLOCK,
    first_block,
    key_order,
    num_blocks,
)
from flashtile.problems.masking import split
from flashtile.reference import fp8 as reference

__all__ = [
    "configure_fp8_attend",
    "configure_fp8_quantize",
    "prepare_fp8_attend",
    "prepare_fp8_quantize",
    "reason_against",
]

BLOCK_M = 512
"""Query rows of a sequence that are computed at a time. Other sizes were not measured."""


def configure_fp8_attend(problem: Fp8Problem | QuantizeProblem) -> str:
    return "emulated in float32"


configure_fp8_quantize = configure_fp8_attend


def prepare_fp8_attend(problem: Fp8Problem, config: str) -> Any:
    return with_exact_products(partial(attend, problem))


def prepare_fp8_quantize(problem: QuantizeProblem, config: str) -> Any:
    return with_exact_products(partial(reference.quantize, problem))


class _Sequence(NamedTuple):
    """The tensors of one sequence in float32, with the heads as the first dimensions."""

    q: Tensor
    """(heads_kv, group, seqlen_q, head_dim)"""
    q_scale: Tensor
    """(heads_kv, group, seqlen_q, 1)"""
    k: Tensor
    """(heads_kv, 1, seqlen_k, head_dim)"""
    v: Tensor
    k_scale: Tensor
    """(heads_kv, 1, blocks of keys)"""
    v_scale: Tensor
    slopes: Tensor | None
    """(heads_kv, group, 1, 1)"""


def attend(
    problem: Fp8Problem, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in the shapes of the problem.

    Rows that belong to no sequence have out 0 and lse -inf.
    """
    scales, extras = tensors.scales, tensors.extras
    out = q.new_zeros(problem.out_shape, dtype=problem.out_dtype)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
    sink = extras.sink
    if sink is not None:
        sink = sink.float().reshape(problem.num_heads_kv, problem.group_size, 1, 1)
    for b, rows, keys in spans(problem, extras):
        of_batch = (slice(None),) if problem.varlen else (b,)
        own_out, own_lse = out[of_batch][rows], lse[of_batch][:, rows]
        one = _gather(problem, q, k, v, scales, extras, b, rows, keys)
        # Rows that see no key are computed as well, because they may have a sink.
        for part in split(range(one.q.shape[2]), BLOCK_M):
            o, statistics = _attend_rows(problem, one, part, sink)
            own_out[part.start : part.stop] = o.flatten(0, 1).movedim(0, 1)
            own_lse[:, part.start : part.stop] = statistics.flatten(0, 1).squeeze(-1)
    return out, lse


def _gather(
    problem: Fp8Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Scales,
    extras: OptionalTensors,
    b: int,
    rows: slice,
    keys: slice,
) -> _Sequence:
    heads_kv, group = problem.num_heads_kv, problem.group_size
    seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
    if not problem.varlen:
        q, k, v = q[b], k[b], v[b]
    own_k = k[keys].float().movedim(1, 0)
    if problem.v_transposed:
        first = first_block(keys.start, b, KEY_BLOCK) * KEY_BLOCK if problem.varlen else 0
        columns = v[..., first : first + num_blocks(seqlen_k, KEY_BLOCK) * KEY_BLOCK].float()
        # V^T is stored in whole blocks, with its keys in the order of Hopper's registers.
        own_v = torch.empty_like(columns)
        own_v[..., key_order(columns.shape[-1], columns.device)] = columns
        own_v = own_v.mT[:, :seqlen_k]
    else:
        own_v = v[keys].float().movedim(1, 0)

    def of_blocks(scale: Tensor | None, heads: int, start: int, length: int, block: int) -> Tensor:
        """Return (heads, blocks), the scales of this sequence's blocks; 1 without scales."""
        count = num_blocks(length, block)
        if scale is None:
            return torch.ones(heads, count, dtype=torch.float32, device="cpu")
        if not problem.block_scales:
            return scale[b].repeat_interleave(heads // scale.shape[1])[:, None].expand(heads, count)
        if not problem.varlen:
            return scale[b, :, :count]
        first = first_block(start, b, block)
        return scale[:, first : first + count]

    q_scale = of_blocks(scales.q, problem.num_heads_q, rows.start, seqlen_q, QUERY_BLOCK)
    slopes = extras.alibi_slopes
    if slopes is not None:
        slopes = (slopes if slopes.dim() == 1 else slopes[b]).reshape(heads_kv, group, 1, 1)
    return _Sequence(
        q=q[rows].float().movedim(1, 0).unflatten(0, (heads_kv, group)),
        q_scale=q_scale.repeat_interleave(QUERY_BLOCK, 1)[:, :seqlen_q].reshape(heads_kv, group, -1, 1),
        k=own_k[:, None],
        v=own_v[:, None],
        k_scale=of_blocks(scales.k, heads_kv, keys.start, seqlen_k, KEY_BLOCK)[:, None],
        v_scale=of_blocks(scales.v, heads_kv, keys.start, seqlen_k, KEY_BLOCK)[:, None],
        slopes=slopes,
    )


def _attend_rows(
    problem: Fp8Problem, one: _Sequence, rows: range, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of some rows: (heads_kv, group, rows, head_dim_v) and (heads_kv, group, rows, 1)."""
    seqlen_q, seqlen_k = one.q.shape[2], one.k.shape[2]
    offset = seqlen_k - seqlen_q
    at = range(rows.start + offset, rows.stop + offset)
    q, q_scale = (t[:, :, rows.start : rows.stop] for t in (one.q, one.q_scale))
    row_max = torch.full_like(q_scale, -torch.inf)
    row_sum = torch.zeros_like(q_scale)
    acc = q.new_zeros((*q.shape[:3], one.v.shape[-1]))
    unit = largest = q.new_zeros((problem.num_heads_kv, 1, 1, 1))
    reached = problem.key_range(at, range(seqlen_k))
    for j in range(reached.start // KEY_BLOCK, num_blocks(reached.stop, KEY_BLOCK)):
        keys = range(j * KEY_BLOCK, min((j + 1) * KEY_BLOCK, seqlen_k))
        if not keys:
            continue
        block = slice(keys.start, keys.stop)
        k_scale, v_scale = (t[..., j, None, None] for t in (one.k_scale, one.v_scale))
        scores = q @ one.k[:, :, block].mT
        scores = _masked_scores(problem, one, scores, q_scale, k_scale, at, keys)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
        # Times 2**8: without it, probabilities of 2**-10 and less would round to 0 in e4m3. row_sum has the
        # factor as well, so only lse is corrected at the end.
        p = torch.exp2(scores - shift + P_EXPONENT)
        alpha = torch.exp2(row_max - shift)
        row_sum = row_sum * alpha + p.sum(-1, keepdim=True)
        row_max = new_max
        if problem.block_scales:
            largest = torch.maximum(largest, v_scale)
            new_unit = torch.maximum(v_scale, largest / LARGEST_RATIO)
            p = p * (v_scale / new_unit)
            alpha = alpha * (unit / new_unit)
            unit = new_unit
        # row_sum is of the probabilities before rounding, as in the GPU kernels.
        acc = acc * alpha + p.to(E4M3).float() @ one.v[:, :, block]
    if not problem.block_scales:  # one scale a head, so it is applied once, at the end
        unit = one.v_scale[..., :1, None] if seqlen_k else largest
    row_max = row_max - P_EXPONENT
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    out = (acc * (unit / row_sum)).masked_fill(empty, 0.0)
    lse = (row_max * LN_2 + row_sum.log()).masked_fill(empty, -torch.inf)
    if sink is not None:
        joined = torch.logaddexp(lse, sink)
        out, lse = out * torch.exp(lse - joined).masked_fill(joined == -torch.inf, 0.0), joined
    return out, lse


def _masked_scores(
    problem: Fp8Problem,
    one: _Sequence,
    scores: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    rows: range,
    keys: range,
) -> Tensor:
    """Turn e4m3 products q k^T, (heads_kv, group, rows, keys), into masked scores in log2 units.

    ``rows`` are the positions of the rows.
    """
    scores = scores * (q_scale * (k_scale * problem.softmax_scale))
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if one.slopes is not None:
        own = torch.arange(rows.start, rows.stop, device="cpu")[:, None]
        scores = scores - one.slopes * (torch.arange(keys.start, keys.stop, device="cpu") - own).abs()
    scores = scores * LOG2_E
    if problem.sees_all(rows, keys):
        return scores
    return scores.masked_fill(~problem.visible(rows, keys), -torch.inf)
