"""Launches of the attention kernels, each for tensors of one signature.

The first call derives a kernel's constants and numbers from the problem, the configuration and the tensors
(:func:`attention_kernel`). Later calls allocate results and pass tensors. What no program writes is filled
before the launch: unused tokens, and calls in which no row sees a key.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.config import (
    KernelConfig,
    has_adjacent_tokens,
    is_aligned,
    outer_stride,
    scales_scores,
    tile_widths,
    token_strides,
)
from flashtile.backends.common.launch import CachedLaunch, Outputs, row_pointers
from flashtile.backends.common.preprocess import num_padded_rows, preprocess_launch, preprocess_rows
from flashtile.backends.portable.attention.arguments import (
    AttentionLengths,
    AttentionNumbers,
    AttentionStrides,
    AttentionVariant,
    PaddingStrides,
    ScoreStrides,
)
from flashtile.backends.portable.attention.backward import (
    BiasSizes,
    DbiasPointers,
    DkdvPointers,
    DqPointers,
    dbias_kernel,
    dkdv_kernel,
    dq_kernel,
)
from flashtile.backends.portable.attention.forward import ForwardPointers, TangentPointers, forward_kernel
from flashtile.backends.portable.attention.functions import (
    FunctionPointers,
    captured_of,
    gradient_function,
    with_functions,
    zero_gradients,
)
from flashtile.backends.portable.config import Config, dbias_tile
from flashtile.backends.portable.key_bounds import KeyBounds
from flashtile.dropout import threshold
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import LOG2_E
from flashtile.problems.masking import KernelMask


def attention_variant(
    problem: Problem,
    config: KernelConfig,
    precision: str,
    wide: bool,
    widths: tuple[int, int],
    by_position: KernelMask,
    mask: Tensor | None,
    bias: Tensor | None,
) -> AttentionVariant:
    """Return the constants of a kernel, without those of ``score_mod`` and ``mask_mod``.

    ``wide``: whether offsets within a tile of q, k or v need 64 bits; ``widths``: columns of the tiles
    of k and v (:func:`tile_widths`); ``by_position``: the mask by position, in addition to the
    tensor ``mask``.
    """
    block_d, block_dv = widths
    return AttentionVariant(
        **by_position.constants,
        VARLEN=problem.varlen,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        HAS_MASK=problem.mask,
        MASK_HAS_ROWS=_has_rows(mask),
        HAS_BIAS=problem.bias,
        BIAS_HAS_ROWS=_has_rows(bias),
        HAS_PADDING=problem.key_padding_mask,
        SCALED_SCORES=scales_scores(problem),
        EVEN_M=not (problem.varlen or problem.seqused_q) and problem.seqlen_q % config.BLOCK_M == 0,
        EVEN_N=not (problem.varlen or problem.seqused_k) and problem.seqlen_k % config.BLOCK_N == 0,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDE=wide,
        WIDE_SCORES=_is_wide(mask) or _is_wide(bias),
        HAS_DROPOUT=problem.dropout_p > 0,
        MASKS_EVERY_BLOCK=problem.mask
        or problem.key_padding_mask
        or problem.mods is not None
        or not problem.in_one_range
        # One loop instead of three, of which the one for full blocks would always be empty. With three,
        # chunks of 100 tokens took 1.2 times as long in the backward pass, and dK/dV spilled more.
        or by_position.cuts_every_tile(config.BLOCK_M, config.BLOCK_N),
        PRECISION=precision,
        SEQUENCES_FIRST=bias is not None and bias.shape[0] == 1 < bias.shape[1],
    )


def _score_strides(tensor: Tensor | None) -> ScoreStrides:
    """Return the strides of a mask or bias that broadcasts to all scores: 0 along dimensions of size 1."""
    if tensor is None:
        return ScoreStrides(0, 0, 0, 0)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return ScoreStrides(*(stride if size > 1 else 0 for size, stride in pairs))


def _has_rows(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.shape[2] > 1


def _is_wide(tensor: Tensor | None) -> bool:
    """Whether offsets within one head of a mask or bias need 64 bits."""
    if tensor is None:
        return False
    _, _, row, key = _score_strides(tensor)
    # 128 is the largest tile: addresses of a partial tile are computed before they are masked.
    return (tensor.shape[2] + 128) * row + (tensor.shape[3] + 128) * key >= 2**31


def _lengths(problem: Problem, by_position: KernelMask, alibi_slopes: Tensor | None) -> AttentionLengths:
    return AttentionLengths(
        alibi_stride=outer_stride(alibi_slopes),
        num_heads_q=problem.num_heads_q,
        group_size=problem.group_size,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        total_k=problem.total_k,
        # These kernels have a parameter for the size of chunks, also without chunks.
        mask=by_position._replace(attention_chunk=by_position.attention_chunk or 0),
        drop_threshold=threshold(problem.dropout_p),
    )


def attention_kernel(
    kernel: Any,
    pointers: Any,
    programs: int,
    config: KernelConfig,
    problem: Problem,
    precision: str,
    inputs: tuple[Tensor, ...],
    extras: OptionalTensors,
    *first: Any,
    owns_keys: bool = False,
    **more: Any,
) -> CachedLaunch:
    """Return the launch of ``kernel``, one of the kernels of an attention call.

    Args:
        pointers: the type of the kernel's structure of tensors.
        inputs: q, k and v; then, with the same strides, the tangents that are given.
        first: the kernel's scalars before the common ones, such as ``padded_rows`` of the backward pass.
        owns_keys: whether each program computes the results of a block of keys (dk, dv), not of rows.
        more: constants of the variant that only this kernel sets.
    """
    block = max(config.BLOCK_M, config.BLOCK_N)
    wide = any(block * tensor.stride(-3) >= 2**31 for tensor in inputs)
    aligned = problem.dtype.itemsize == 2 and problem.head_dim_v % 16 == 0 and all(map(is_aligned, inputs))
    mask = problem.for_kernels(problem.seqlen_q, problem.seqlen_k)
    widths = tile_widths(problem.head_dim, problem.head_dim_v, aligned, has_adjacent_tokens(*inputs[1:3]))
    variant = attention_variant(problem, config, precision, wide, widths, mask, extras.mask, extras.bias)
    variant = replace(variant, **more)
    if problem.mods is not None:
        variant = with_functions(variant, problem, config, owns_keys)
    padding = (0, 0) if extras.key_padding_mask is None else extras.key_padding_mask.stride()
    q, k, v = map(token_strides, inputs[:3])
    strides = AttentionStrides(
        q=q,
        k=k,
        v=v,
        mask=_score_strides(extras.mask),
        padding=PaddingStrides(*padding),
        bias=_score_strides(extras.bias),
    )
    lengths = _lengths(problem, mask, extras.alibi_slopes)
    scale, keep_scale = problem.softmax_scale, 1 / (1 - problem.dropout_p)
    numbers = AttentionNumbers(scale, scale * LOG2_E, problem.softcap, keep_scale)
    scalars = (*first, strides, lengths, numbers)
    return CachedLaunch(kernel, programs, scalars, (variant,), config, pointers=pointers)


def dbias_kernel_of(
    problem: Problem,
    config: Config,
    inputs: tuple[Tensor, Tensor, Tensor],
    extras: OptionalTensors,
    padded_rows: int,
) -> CachedLaunch:
    """Return the launch of the kernel that computes the bias's gradient. ``inputs`` are q, k and v."""
    assert extras.bias is not None
    tile = dbias_tile(config)
    batch, heads, rows, keys = extras.bias.shape
    programs = batch * heads * triton.cdiv(rows, tile.BLOCK_M) * triton.cdiv(keys, tile.BLOCK_N)
    sizes = BiasSizes(problem.batch, batch, heads, rows)
    return attention_kernel(
        dbias_kernel, DbiasPointers, programs, tile, problem, config.precision, inputs, extras, sizes,
        padded_rows,
    )  # fmt: skip


def optional_pointers(extras: OptionalTensors, key_bounds: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the optional tensors, the last arguments of a kernel without score and mask functions."""
    return (*extras, key_bounds, None, None)


class PortableForwardLaunch:
    """``(q, k, v, extras[, out, lse]) -> (out, lse)`` for tensors of one signature."""

    writes_into = True

    def __init__(self, problem: Problem, config: Config) -> None:
        self._problem = problem
        self._config = config
        self._outputs = Outputs(problem, all_written=not (problem.varlen or problem.seqused_q))
        self._statistics = problem.statistics
        self._key_bounds: Any = None
        self._functions: FunctionPointers | None = None
        self._kernel: CachedLaunch | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._outputs(q, out, lse)
        rows = row_pointers(lse, self._statistics)
        self._launch(q, k, v, out, rows, extras)
        return out, lse

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: tuple, extras: Any, tangents: tuple = ()
    ) -> None:
        """Run the kernel. ``rows`` are its tensors after out, ``tangents`` those of q, k and v among them."""
        kernel = self._kernel
        if kernel is None:
            problem, config = self._problem, self._config.forward
            programs = triton.cdiv(problem.seqlen_q, config.BLOCK_M) * problem.num_heads_q * problem.batch
            if out.numel() == 0 or programs == 0:
                return
            kernel = self._kernel = self._prepare(programs, q, k, v, extras, tangents)
        if self._functions is None:
            bounds = self._key_bounds and self._key_bounds(extras.key_padding_mask)
            kernel(q.device, q, k, v, out, *rows, *optional_pointers(extras, bounds))
        else:
            captured = captured_of(extras)
            kernel(q.device, q, k, v, out, *rows, *self._functions(kernel, extras, captured))

    def _prepare(
        self, programs: int, q: Tensor, k: Tensor, v: Tensor, extras: Any, tangents: tuple
    ) -> CachedLaunch:
        problem, config = self._problem, self._config
        if problem.mods is not None:
            self._functions = FunctionPointers(problem, extras)
        elif extras.key_padding_mask is not None:
            self._key_bounds = KeyBounds(problem, extras.key_padding_mask)
        pointers = TangentPointers if tangents else ForwardPointers
        inputs = (q, k, v, *(tangent for tangent in tangents if tangent is not None))
        return attention_kernel(
            forward_kernel, pointers, programs, config.forward, problem, config.precision, inputs, extras,
            HAS_TANGENTS=bool(tangents),
        )  # fmt: skip


class PortableTangentsLaunch(PortableForwardLaunch):
    """``(q, k, v, their tangents, extras) -> (out, lse, their tangents)`` for tensors of one signature.

    Each tangent of an input has the strides of its tensor, or is None.
    """

    writes_into = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        *tangents, extras = others
        out, lse = self._outputs(q)
        out_tangent, lse_tangent = map(self._new_tangent, (out, lse))
        rows = (lse, None, None, *tangents, out_tangent, lse_tangent)
        self._launch(q, k, v, out, rows, extras, tuple(tangents))
        return out, lse, out_tangent, lse_tangent

    def _new_tangent(self, like: Tensor) -> Tensor:
        return torch.empty_like(like) if self._outputs.all_written else torch.zeros_like(like)


class PortableBackwardLaunch:
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, dbias)``, of one signature.

    With ``score_mod`` or ``mask_mod``, gradients of captured tensors follow.
    """

    def __init__(self, problem: Problem, config: Config) -> None:
        self._problem = problem
        self._config = config
        self._padded_rows = num_padded_rows(problem.seqlen_q, problem.total_q, problem.batch, problem.varlen)
        sequences = 1 if problem.varlen else problem.batch
        self.statistics_shape = (sequences, problem.num_heads_q, self._padded_rows)
        self._key_bounds: Any = None
        self._functions: FunctionPointers | None = None
        self._dbias: CachedLaunch | None = None
        self.kernels: tuple[CachedLaunch, CachedLaunch, CachedLaunch] | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Any,
    ) -> tuple[Tensor | None, ...]:
        problem, sink = self._problem, extras.sink
        no_rows = problem.batch * problem.seqlen_q == 0
        no_keys = problem.batch * problem.seqlen_k == 0
        # No program writes tokens that are unused or in no sequence. Without rows or without keys, no program
        # writes anything.
        some_unwritten = problem.varlen or problem.seqused_q or problem.seqused_k or no_rows or no_keys
        allocate = partial(q.new_zeros if some_unwritten else q.new_empty, dtype=problem.out_dtype)
        dq, dk, dv = allocate(q.shape), allocate(k.shape), allocate(v.shape)
        if no_rows or (no_keys and sink is None):
            dsink = None if sink is None else torch.zeros_like(sink)
            return dq, dk, dv, dsink, *self._zero_gradients(extras)
        dentropy = None
        if problem.entropy and dlse is not None:
            dlse, dentropy = dlse.unbind(-1)
        if self.kernels is None:
            self.kernels = self.prepare(dlse, q, k, v, extras)
        preprocess, compute_dkdv, compute_dq = self.kernels
        neg_lse = q.new_empty(*self.statistics_shape, dtype=torch.float32)
        neg_delta = q.new_empty(*self.statistics_shape, dtype=torch.float32)
        dsink = preprocess_rows(preprocess, neg_lse, neg_delta, out, dout, lse, dlse, extras)
        if no_keys:
            return dq, dk, dv, dsink, *self._zero_gradients(extras)
        inputs = (q, k, v, dout, neg_lse, neg_delta, dentropy)
        functions = self._functions
        if functions is not None:
            captured = captured_of(extras)
            gradients = functions.new_gradients(captured)
            compute_dkdv(
                q.device, *inputs, dk, dv, *functions(compute_dkdv, extras, captured, owns_keys=True)
            )
            compute_dq(q.device, *inputs, dq, *functions(compute_dq, extras, captured, gradients))
            return dq, dk, dv, dsink, None, *functions.cast(gradients, captured)
        bounds = self._key_bounds and self._key_bounds(extras.key_padding_mask)
        others = optional_pointers(extras, bounds)
        compute_dkdv(q.device, *inputs, dk, dv, *others)
        compute_dq(q.device, *inputs, dq, *others)
        dbias, bias = None, extras.bias
        if problem.bias_grad and bias is not None:
            if self._dbias is None:
                self._dbias = dbias_kernel_of(problem, self._config, (q, k, v), extras, self._padded_rows)
            dbias = bias.new_empty(bias.shape)
            self._dbias(q.device, *inputs, dbias, *others)
        return dq, dk, dv, dsink, dbias

    def _zero_gradients(self, extras: Any) -> tuple[Tensor | None, ...]:
        """Return zero gradients of the bias or of captured tensors, for calls in which no row sees a key."""
        problem = self._problem
        if problem.mods is not None:
            return None, *zero_gradients(problem.mods, extras)
        wanted = problem.bias_grad and extras.bias is not None
        return (torch.zeros_like(extras.bias) if wanted else None,)

    def prepare(
        self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any
    ) -> tuple[CachedLaunch, CachedLaunch, CachedLaunch]:
        problem, config = self._problem, self._config
        more: dict[str, Any] = {}
        if problem.mods is not None:
            self._functions = FunctionPointers(problem, extras)
            more["ADD_GRADIENTS"] = gradient_function(problem.mods)
        elif extras.key_padding_mask is not None:
            self._key_bounds = KeyBounds(problem, extras.key_padding_mask)
        preprocess = preprocess_launch(problem, dlse is not None, LOG2_E)
        common = (problem, config.precision, (q, k, v), extras, self._padded_rows)
        programs = triton.cdiv(problem.seqlen_k, config.dkdv.BLOCK_N) * problem.num_heads_kv * problem.batch
        dkdv = attention_kernel(dkdv_kernel, DkdvPointers, programs, config.dkdv, *common, owns_keys=True)
        programs = triton.cdiv(problem.seqlen_q, config.dq.BLOCK_M) * problem.num_heads_q * problem.batch
        dq = attention_kernel(dq_kernel, DqPointers, programs, config.dq, *common, **more)
        return preprocess, dkdv, dq
