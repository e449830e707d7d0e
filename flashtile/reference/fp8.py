"""References for FP8: quantisation, bit-identical to the kernels', and attention over quantised tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems import fp8_layout as layout
from flashtile.problems.fp8 import QuantizeProblem, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX, SMALLEST_LARGEST
from flashtile.problems.quantized import Quantized, sequences
from flashtile.reference import attention as reference
from flashtile.reference.decode import rotate


class _Sequence(NamedTuple):
    """One sequence in float32 after rotary embedding and Hadamard transform, padded to whole blocks.

    Attributes:
        b: index of the sequence.
        start: index of the sequence's first row among all rows; 0 in a dense batch.
        length: number of rows.
        blocks: (heads, blocks, rows, columns), zeros after the last row in use.
    """

    b: int
    start: int
    length: int
    blocks: Tensor

    @property
    def largest(self) -> Tensor:
        """Largest finite magnitude of each block, (heads, blocks)."""
        magnitude = self.blocks.abs()
        return magnitude.masked_fill(~magnitude.isfinite(), 0.0).amax((-1, -2))


def quantize(problem: QuantizeProblem, x: Tensor, tensors: QuantizeTensors) -> tuple[Tensor, Tensor]:
    """Quantise x, and return (values, scales) in the problem's shapes, with zeros outside of sequences."""
    values = x.new_zeros(problem.values_shape, dtype=E4M3)
    scales = x.new_zeros(problem.scales_shape, dtype=torch.float32)
    sequences = [_prepare(problem, rows, b, start, tensors) for b, start, rows in _rows(x, tensors)]
    if problem.method == "block":
        for one in sequences:
            largest = one.largest.clamp_min(SMALLEST_LARGEST)
            own = scales if problem.varlen else scales[one.b]
            first = layout.first_block(one.start, one.b, problem.rows) if problem.varlen else 0
            own[:, first : first + largest.shape[1]] = largest / E4M3_MAX * problem.normalizer
            _write(problem, values, one, largest)
        return values, scales
    if tensors.scale is not None:
        scales = problem.largest_of(tensors.scale)
    else:
        for one in (one for one in sequences if one.length):
            own = scales[one.b] if problem.method == "head" else scales[0]
            largest = one.largest.amax(1)
            own.copy_(torch.maximum(own, largest if problem.method == "head" else largest.max()))
    largest = scales.clamp_min(SMALLEST_LARGEST).expand(problem.batch, problem.num_heads)
    for one in sequences:
        _write(problem, values, one, largest[one.b][:, None])
    return values, scales.clamp_min_(SMALLEST_LARGEST).div_(E4M3_MAX).mul_(problem.normalizer)


def _rows(x: Tensor, tensors: QuantizeTensors) -> Iterator[tuple[int, int, Tensor]]:
    """Return (index, first row, rows (length, heads, head_dim)) of each sequence."""
    if tensors.cu_seqlens is None:
        return ((b, 0, rows) for b, rows in enumerate(x))
    offsets = tensors.cu_seqlens.tolist()
    return ((b, start, x[start:end]) for b, (start, end) in enumerate(pairwise(offsets)))


def _prepare(
    problem: QuantizeProblem, rows: Tensor, b: int, start: int, tensors: QuantizeTensors
) -> _Sequence:
    length = rows.shape[0]
    used = length if tensors.seqused is None else int(tensors.seqused[b])
    y = rows[:used].float()
    if tensors.rotary_cos is not None and tensors.rotary_sin is not None:
        offset = problem.rotary_offset
        if tensors.rotary_offsets is not None:
            offset += int(tensors.rotary_offsets[b])
        last = tensors.rotary_cos.shape[0] - 1
        positions = torch.arange(offset, offset + used, device=y.device).clamp(0, last)
        y = rotate(y, tensors.rotary_cos, tensors.rotary_sin, positions, problem.rotary_interleaved)
    num_blocks = layout.num_blocks(length, problem.rows)
    blocks = y.new_zeros((num_blocks * problem.rows, problem.num_heads, problem.stored_head_dim))
    blocks[:used, :, : problem.head_dim] = y
    if problem.seed is not None:
        blocks = layout.hadamard_transform(blocks, problem.seed)
    return _Sequence(b, start, length, blocks.movedim(1, 0).unflatten(1, (num_blocks, problem.rows)))


def _write(problem: QuantizeProblem, values: Tensor, one: _Sequence, largest: Tensor) -> None:
    """Write the e4m3 values of one sequence.

    ``largest`` is the largest magnitude of each block, (heads, blocks), or of each head, (heads, 1).
    """
    # The numerator is a tensor, because torch computes number / tensor as number * (1 / tensor).
    inverse = torch.full_like(largest, E4M3_MAX) / largest
    scaled = (one.blocks * inverse[..., None, None]).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = scaled.masked_fill(~one.blocks.isfinite(), torch.nan).to(E4M3)  # e4m3 has no infinity
    if problem.role == "v":
        order = layout.key_order(problem.rows, scaled.device)
        transposed = scaled[:, :, order].flatten(1, 2).mT  # (heads, head_dim, columns)
        first = layout.first_block(one.start, one.b, problem.rows) if problem.varlen else 0
        own = values if problem.varlen else values[one.b]
        own[..., first * problem.rows : first * problem.rows + transposed.shape[-1]] = transposed
    else:
        own = values[one.start : one.start + one.length] if problem.varlen else values[one.b]
        own.copy_(scaled.flatten(1, 2)[:, : one.length].movedim(0, 1))


def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_scale: float | None = None,
    upcast: torch.dtype = torch.float64,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of standard attention over dequantised q, k and v.

    Args:
        q, k, v: one of three kinds: results of :func:`flashtile.fp8.quantize`; float8_e4m3fn tensors, whose
            scales are the descales; or tensors in any other floating dtype.
        q_descale, k_descale, v_descale: as for :func:`flashtile.flash_attn_func`.
        p_scale: probabilities are multiplied by this and rounded to e4m3 before the second product, as in FP8
            attention; None does not round them.
        upcast: dtype of all arithmetic and of out.
        arguments: the other arguments of :func:`flashtile.reference.attention.attention`. ``cu_seqlens``,
            ``max_seqlen`` and ``seqused`` default to the values stored in the quantised tensors.
    """
    scales = (q_descale, k_descale, v_descale)
    dequantized, arguments = dequantize(q, k, v, scales, upcast, arguments)
    round_p = None if p_scale is None else lambda p: (p * p_scale).to(E4M3).to(upcast) / p_scale
    return reference.attention(*dequantized, upcast=upcast, round_p=round_p, **arguments)


def dequantize(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: torch.dtype,
    arguments: dict[str, Any],
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Dequantise q, k and v to ``dtype``, and return ((q, k, v), arguments of standard attention over them).

    The returned arguments have the ``cu_seqlens``, ``max_seqlen`` and ``seqused`` that the quantised tensors
    store, unless the caller gave these arguments.
    """
    arguments = dict(arguments)
    for side, of in (("q", (q,)), ("k", (k, v))):
        names = f"cu_seqlens_{side}", f"max_seqlen_{side}", "seqused_k"
        given = (arguments.get(name) for name in names)
        found = sequences(of, *given)
        arguments.update(zip(names if side == "k" else names[:2], found, strict=False))
    if arguments.get("softmax_scale") is None:
        arguments["softmax_scale"] = q.shape[-1] ** -0.5
    if arguments.get("sink") is not None:
        arguments["sink"] = arguments["sink"].float()
    # If both are quantised, q k^T sums over all stored columns. After the Hadamard transform, columns beyond
    # head_dim are not zero.
    transformed = isinstance(q, Quantized) and isinstance(k, Quantized)
    rows = tuple(
        x.dequantize(dtype, transformed=transformed)
        if isinstance(x, Quantized)
        else descaled(x.to(dtype), descale, arguments[f"cu_seqlens_{side}"])
        for x, descale, side in zip((q, k, v), scales, "qkk", strict=True)
    )
    return rows, arguments


def descaled(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Multiply x by ``descale``, which has one factor for each head of each sequence.

    The query heads of a group may share the factor of their key head.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed, (total, heads, head_dim).
        descale: (batch, heads) or (batch, heads_kv). None means 1.
        cu_seqlens: offsets of packed sequences; None for a dense batch.
    """
    if descale is None:
        return x
    scale = descale.to(x.dtype).repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    if cu_seqlens is None:
        return x * scale[:, None, :, None]
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    b = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    inside = b < scale.shape[0]
    return torch.where(inside[:, None, None], x * scale[b * inside][..., None], 0.0)
