"""Public functions for quantisation and attention in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import ERRORS, check_choice, check_dense, renamed
from flashtile.checks.conversions import (
    as_int,
    as_masking,
    as_offset_pair,
    as_offsets,
    check_flag,
    make_options,
    under_autocast,
)
from flashtile.checks.fp8 import check_inputs, check_sequences
from flashtile.op.refusals import transforming
from flashtile.operators.fp8 import QUANTIZE, refuse_gradient
from flashtile.operators.fp8_gradients import StraightThrough, attend
from flashtile.problems.attention import Options
from flashtile.problems.common import shared_fields
from flashtile.problems.fp8 import AttendOptions, AttendTensors, QuantizeOptions, QuantizeTensors
from flashtile.problems.fp8_layout import METHODS, ROLES
from flashtile.problems.quantized import Quantized, sequences

QUANTIZING = ("portable", "cpu")
"""Backends that can quantise."""


def quantize(
    x: Tensor,
    role: str,
    *,
    method: str = "block",
    hadamard: bool = True,
    seed: int = 0,
    scale: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seqused: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_offset: int | Tensor = 0,
    rotary_interleaved: bool = False,
    backend: str | None = None,
) -> Quantized:
    """Quantise one of q, k and v to e4m3 (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, section 3.3).

    x is read once with method "block", and twice with the other methods. Quantised keys and values can be
    used in any number of calls.

    The tokens of a block, head or tensor share a scale. Even under a causal mask, the stored numbers of an
    earlier token therefore depend on later tokens, unless ``scale`` is given.

    In the backward pass, quantising counts as the identity (straight-through estimator). The gradient of x is
    that of the dequantised tensor, rotated back if there is a rotary embedding.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``; float16 or
            bfloat16, head_dim from 1 to 256. The last stride must be 1. An infinity becomes NaN, because
            e4m3 has no infinity. Infinities and NaNs do not affect the scale, and no finite number becomes
            NaN.
        role: "q", "k" or "v". Values are stored transposed, in the order that the kernels need.
        method: the elements that share a scale. "block": 64 rows of a head of q, or 128 keys of a head of k
            or v; "head": a head of a sequence; "tensor": all of x. The scale is the largest magnitude of
            these elements divided by 448.
        hadamard: multiply q and k by a random orthogonal matrix first, which spreads outliers over the
            columns and leaves q k^T unchanged. q and k of a call must have the same ``hadamard`` and
            ``seed``. Values are not transformed.
        seed: seed of the matrix's random signs, from 0 to 2**31 - 1. A seed gives the same signs on every
            device and in every run.
        scale: the scales to use with method "head" or "tensor", such as ``scales`` of an earlier result:
            float32, above 0, (batch, heads), (1, heads) or (1, 1). None: they are computed from x. With given
            scales, x is read once, and the stored numbers of a row do not depend on other rows. After the
            transform, numbers are clamped to 448 times the scale in magnitude.
        cu_seqlens, max_seqlen: (batch + 1,) int32 offsets of the sequences, and the length of the longest (or
            more).
        seqused: (batch,) int32: the number of rows in use in each sequence. The other rows become 0.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float16, bfloat16 or float32: rotary embedding of
            q or k, applied first, in float32. rotary_dim is even and at most head_dim.
        rotary_offset: position of each sequence's first row, an int or (batch,) int32. Positions from a
            tensor are clamped to the ends of the tables.
        rotary_interleaved: True if the two numbers of a rotary pair are adjacent (GPT-J), False if they are
            rotary_dim / 2 apart (Llama).
        backend: "portable" or "cpu" to require this backend.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> k = torch.randn(1, 256, 2, 64, dtype=torch.bfloat16)
        >>> keys = flashtile.fp8.quantize(k, "k", hadamard=False)
        >>> keys.values.dtype, keys.scales.shape  # a scale for each block of 128 keys of a head
        (torch.float8_e4m3fn, torch.Size([1, 2, 2]))
        >>> bool((keys.dequantize() - k).abs().max() < 0.2)
        True
    """
    check_choice("role", role, ROLES)
    check_flag("hadamard", hadamard)
    check_flag("rotary_interleaved", rotary_interleaved)
    if max_seqlen is not None:
        max_seqlen = as_int("max_seqlen", max_seqlen)
    used_seed = as_int("seed", seed) if hadamard and role != "v" else None
    return _quantize(
        x, role, method, used_seed, as_offsets(cu_seqlens), max_seqlen, seqused, rotary_cos, rotary_sin,
        rotary_offset, rotary_interleaved, backend, scale=scale,
    )  # fmt: skip


def _quantize(
    x: Tensor,
    role: str,
    method: str,
    seed: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    seqused: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_offset: int | Tensor,
    rotary_interleaved: bool,
    backend: str | None,
    names: dict[str, str] | None = None,
    scale: Tensor | None = None,
) -> Quantized:
    """Quantise as :func:`quantize` does. ``names`` maps arguments to the names that errors use for them."""
    offsets = rotary_offset if isinstance(rotary_offset, Tensor) else None
    offset = 0 if isinstance(rotary_offset, Tensor) else as_int("rotary_offset", rotary_offset)
    tensors = QuantizeTensors(
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_offsets=offsets,
        scale=scale,
    )
    options = QuantizeOptions(
        role=role,
        method=method,
        seed=seed,
        max_seqlen=max_seqlen,
        rotary_offset=offset,
        rotary_interleaved=rotary_interleaved,
        backend=backend,
    )
    try:
        check_dense("x", x)
        learns = x.requires_grad and torch.is_grad_enabled() and not transforming()
        for name in ("rotary_cos", "rotary_sin", "scale"):
            if isinstance(getattr(tensors, name), Tensor):
                refuse_gradient(name, getattr(tensors, name))
        values, scales = QUANTIZE((x.detach() if learns else x,), tensors, options)
    except ERRORS as error:
        raise (renamed(error, names) if names else error) from None
    return Quantized(
        values=values,
        scales=scales,
        role=role,
        method=method,
        seed=seed,
        shape=tuple(x.shape),
        dtype=x.dtype,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        seqused=seqused,
        source=StraightThrough.apply(x, tensors, options) if learns else None,
    )


def _names(role: str) -> dict[str, str]:
    """Map the arguments of :func:`quantize` to the names that callers of :func:`attention` know."""
    side = "q" if role == "q" else "k"
    return {
        "x": role,
        "cu_seqlens": f"cu_seqlens_{side}",
        "max_seqlen": f"max_seqlen_{side}",
        "seqused": "seqused_k",
    }


def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    method: str | None = None,
    hadamard: bool | None = None,
    seed: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | Any:
    """Compute attention with e4m3 operands, and its gradients in 16 bits.

    Scores and sums are float32; probabilities, at most 1, are multiplied by 2**8 and rounded to e4m3. The
    result approximates exact attention: ``docs/guides/fp8.md`` states the error and when not to use FP8.

    q, k, v and sink have gradients. The forward pass keeps the quantised tensors, out and lse. The backward
    pass dequantises the tensors to the dtype of q, calls the backward pass of :func:`flashtile.attention`,
    and passes the gradients to the tensors before quantisation. The gradients themselves cannot be
    differentiated. alibi_slopes and the rotary tables get no gradient.

    Args:
        q, k, v: as for :func:`flashtile.attention`, float16 or bfloat16, or results of :func:`quantize`.
        method, hadamard, seed: how tensors are quantised, as for :func:`quantize`. None means the settings of
            the tensors that are already quantised or, if there are none, "block", True and 0.
        rotary_cos, rotary_sin, rotary_interleaved: rotary embedding as for :func:`quantize`, for q and k that
            are not quantised yet. Keys start at position 0, and queries are aligned to the bottom right, as
            masks are.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as for
            :func:`flashtile.attention`. None means the values that :func:`quantize` got for a tensor.
        softmax_scale, causal, window_size, softcap, alibi_slopes, return_lse, deterministic, backend: as for
            :func:`flashtile.attention`.
        sink: (heads_q,), float16, bfloat16 or float32.

    Returns:
        out in the dtype of q, or (out, lse), as :func:`flashtile.attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> q = torch.randn(1, 256, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> k, v = torch.randn(2, 1, 256, 2, 64, dtype=torch.bfloat16).unbind()
        >>> keys = flashtile.fp8.quantize(k, "k")  # once, for many calls
        >>> values = flashtile.fp8.quantize(v, "v")
        >>> out, lse = flashtile.fp8.attention(q, keys, values, causal=True, return_lse=True)
        >>> out.shape, out.dtype
        (torch.Size([1, 256, 8, 64]), torch.bfloat16)
        >>> out.sum().backward()
        >>> q.grad.shape, q.grad.dtype
        (torch.Size([1, 256, 8, 64]), torch.bfloat16)
    """
    q, k, v = under_autocast(q, k, v)
    check_inputs(q, k, v)
    check_flag("rotary_interleaved", rotary_interleaved)
    method, seed = shared_method({"q": q, "k": k, "v": v}, method, hadamard, seed)
    cu_seqlens_q, max_seqlen_q, _ = sequences((q,), cu_seqlens_q, max_seqlen_q, None)
    cu_seqlens_k, max_seqlen_k, seqused_k = sequences((k, v), cu_seqlens_k, max_seqlen_k, seqused_k)
    cu_seqlens_q, cu_seqlens_k = as_offset_pair(cu_seqlens_q, cu_seqlens_k)
    check_sequences(q, cu_seqlens_q, cu_seqlens_k, seqused_k)
    check_flag("return_lse", return_lse)
    options = make_options(
        as_masking(causal, window_size),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
    )
    own_backend = backend if backend in QUANTIZING else None
    if isinstance(q, Tensor):
        offset: int | Tensor = 0
        if rotary_cos is not None:
            offset = _query_offset(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, options)
        q = _quantize(
            q, "q", method, seed, cu_seqlens_q, options.max_seqlen_q, None, rotary_cos, rotary_sin, offset,
            rotary_interleaved, own_backend, _names("q"),
        )  # fmt: skip
    if isinstance(k, Tensor):
        k = _quantize(
            k, "k", method, seed, cu_seqlens_k, options.max_seqlen_k, seqused_k, rotary_cos, rotary_sin, 0,
            rotary_interleaved, own_backend, _names("k"),
        )  # fmt: skip
    if isinstance(v, Tensor):
        v = _quantize(
            v, "v", method, None, cu_seqlens_k, options.max_seqlen_k, seqused_k, None, None, 0, False,
            own_backend, _names("v"),
        )  # fmt: skip
    tensors = AttendTensors(
        q_descale=scales_of(q),
        k_descale=scales_of(k),
        v_descale=scales_of(v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sink=sink,
    )
    stored = AttendOptions(
        **shared_fields(AttendOptions, options),
        out_dtype=q.dtype,
        head_dim=q.shape[-1],
        v_transposed=True,
        block_scales=method == "block",
    )
    try:
        out, lse = attend((q, k, v), tensors, stored)
    except ERRORS as error:
        raise renamed(error, {f"{name}_descale": f"{name}.scales" for name in "qkv"}) from None
    return (out, lse) if return_lse else out


def shared_method(
    given: dict[str, Any], method: str | None, hadamard: bool | None, seed: int | None
) -> tuple[str, int | None]:
    """Return the (method, seed) that all tensors of a call share.

    The seed is None without a Hadamard transform.
    """
    if hadamard is not None and type(hadamard) is not bool:
        raise TypeError(f"hadamard must be True, False or None, got {type(hadamard).__name__}")
    check_choice("method", method, (None, *METHODS))
    wanted = 0 if seed is None else as_int("seed", seed)
    done = {name: x for name, x in given.items() if isinstance(x, Quantized)}
    for name, x in done.items():
        if method is None:
            method = x.method
        if x.method != method:
            raise ValueError(f"{name} was quantised by {x.method!r}, but the call's method is {method!r}")
    transformed = {name: x.seed for name, x in done.items() if name != "v"}
    if transformed:
        name, shared = next(iter(transformed.items()))
        if any(other != shared for other in transformed.values()):
            raise ValueError(f"q and k must share a transform, got seeds {transformed} (None: no transform)")
        refused = hadamard is not None and hadamard != (shared is not None)
        if refused or (seed is not None and wanted != shared):
            got = f"hadamard={hadamard}, seed={seed}"
            raise ValueError(f"{name} was transformed with seed {shared} (None: no transform), got {got}")
        return "block" if method is None else method, shared
    return "block" if method is None else method, None if hadamard is False else wanted


def _query_offset(
    q: Tensor,
    k: Tensor | Quantized,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    options: Options,
) -> int | Tensor:
    """Return the position of each sequence's first query: its number of keys minus its number of queries.

    Raises:
        ValueError: queries outnumber keys without a causal mask. The first ones would be at negative
            positions, for which the rotary tables have no rows.
    """
    if seqused_k is not None:
        lengths = seqused_k
    elif cu_seqlens_k is not None:
        lengths = cu_seqlens_k.diff()
    else:
        offset = k.shape[1] - q.shape[1]
        if offset >= 0:
            return offset
        if options.masking.window_right != 0:
            raise ValueError(
                f"rotary_cos must be None, or causal True, where queries outnumber keys: the first {-offset} "
                f"of {q.shape[1]} queries stand before position 0"
            )
        return torch.full(q.shape[:1], offset, dtype=torch.int32, device=q.device)
    return lengths - (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff())


def scales_of(x: Quantized) -> Tensor:
    """Return the scales in the shape that kernels take: one per block, or (batch, heads)."""
    if x.method != "tensor":
        return x.scales
    batch = x.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return x.scales.expand(batch, x.shape[-2])
