"""Quantisation and attention in FP8: the functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.arguments import apply_autocast, as_int, make_options
from flashtile.checks.fp8 import check_inputs
from flashtile.decode.arguments import check_flag
from flashtile.fp8 import operators
from flashtile.fp8.problem import AttendOptions, QuantizeOptions, QuantizeTensors, Scales
from flashtile.fp8.quantized import Quantized
from flashtile.problem import NO_EXTRAS, Extras, Options, check_dense

QUANTIZING = ("portable", "cpu")
"""Backends that quantise."""


def quantize(
    x: Tensor,
    role: str,
    *,
    method: str = "block",
    hadamard: bool = True,
    seed: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seqused: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_offset: int | Tensor = 0,
    rotary_interleaved: bool = False,
    backend: str | None = None,
) -> Quantized:
    """One of q, k and v in e4m3, in one pass over memory where scales are of blocks and in two otherwise.

    Keys and values quantised once serve any number of calls. FlashAttention-3 (Shah et al. 2024,
    arXiv:2407.08608), section 3.3. There is no gradient.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``; float16 or
            bfloat16, any strides whose last is 1, head_dim from 1 to 256. An infinity becomes NaN, as e4m3
            has none; what is not finite counts for no scale, and no finite number becomes NaN.
        role: "q", "k" or "v". Values are stored transposed, in the order that the kernels want.
        method: what shares a scale, which is its largest magnitude over 448: "block" is 64 rows of a head of
            q, or 128 keys of a head; "head" a head of a sequence; "tensor" everything.
        hadamard: multiply q and k by a random orthogonal matrix first, which spreads outliers over the
            columns and leaves q k^T as it is. q and k of a call must agree in it. Values are left alone.
        seed: of that matrix's signs, from 0 to 2**31 - 1: the same numbers on every device and run.
        cu_seqlens, max_seqlen: (batch + 1,) int32 offsets of the sequences, and the longest (or more).
        seqused: (batch,) int32: rows of each sequence that are in use; the others become 0, whatever they
            hold.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float16, bfloat16 or float32: rotary embedding of
            q or k before all else, in float32. rotary_dim is even and at most head_dim.
        rotary_offset: position of a sequence's first row, an int or (batch,) int32. Positions of a tensor's
            are cut off at the ends of the tables.
        rotary_interleaved: pairs are neighbours (GPT-J) instead of half a rotary_dim apart (Llama).
        backend: "portable" or "cpu" to insist on one.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.
    """
    check_flag("hadamard", hadamard)
    if max_seqlen is not None:
        max_seqlen = as_int("max_seqlen", max_seqlen)
    used_seed = as_int("seed", seed) if hadamard and role != "v" else None
    return _quantize(
        x, role, method, used_seed, cu_seqlens, max_seqlen, seqused, rotary_cos, rotary_sin, rotary_offset,
        rotary_interleaved, backend, of_call=False,
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
    of_call: bool = True,
) -> Quantized:
    """``of_call``: x is known by its role."""
    check_dense("x", x)
    operators.refuse_gradient((role if of_call else "x", x))
    check_flag("rotary_interleaved", rotary_interleaved)
    offsets = rotary_offset if isinstance(rotary_offset, Tensor) else None
    offset = 0 if isinstance(rotary_offset, Tensor) else as_int("rotary_offset", rotary_offset)
    tensors = QuantizeTensors(cu_seqlens, seqused, rotary_cos, rotary_sin, offsets)
    options = QuantizeOptions(role, method, seed, max_seqlen, offset, rotary_interleaved, backend)
    values, scales = operators.quantize(x, tensors, options)
    return Quantized(
        values, scales, role, method, seed, tuple(x.shape), x.dtype, cu_seqlens, max_seqlen, seqused
    )


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
    backend: str | None = None,
) -> Any:
    """Attention whose products are of e4m3 numbers; forward only.

    Scores and sums are float32; probabilities, at most 1, are rounded to e4m3 times 2**8. Near exact
    attention, not equal to it: ``docs/guides/fp8.md`` says how near, and when not to use it.

    Args:
        q, k, v: as for :func:`flashtile.attention`, float16 or bfloat16, or what :func:`quantize` made.
        method, hadamard, seed: how tensors are quantised, as for :func:`quantize`. None is what those that
            are quantised already had, else "block", True and 0.
        rotary_cos, rotary_sin, rotary_interleaved: rotary embedding of those of q and k that are not
            quantised yet, as for :func:`quantize`: keys from position 0, queries aligned at the bottom right,
            as masks are.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as for
            :func:`flashtile.attention`; a quantised tensor brings its own.
        softmax_scale, causal, window_size, softcap, alibi_slopes, return_lse, backend: as for
            :func:`flashtile.attention`.
        sink: (heads_q,), float16, bfloat16 or float32.

    Returns:
        out in the dtype of q, or (out, lse), as :func:`flashtile.attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed; a q,
            k or v that needs a gradient is a NotImplementedError.
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = apply_autocast(q, k, v)  # type: ignore[arg-type]
    check_inputs(q, k, v)
    method, seed = agreed({"q": q, "k": k, "v": v}, method, hadamard, seed)
    cu_seqlens_q, max_seqlen_q, _ = sequences((q,), cu_seqlens_q, max_seqlen_q, None)
    cu_seqlens_k, max_seqlen_k, seqused_k = sequences((k, v), cu_seqlens_k, max_seqlen_k, seqused_k)
    options = make_options(
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, False, backend
    )
    own_backend = backend if backend in QUANTIZING else None
    if isinstance(q, Tensor):
        offset: int | Tensor = 0
        if rotary_cos is not None:
            offset = _query_offset(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k)
        q = _quantize(
            q, "q", method, seed, cu_seqlens_q, options.max_seqlen_q, None, rotary_cos, rotary_sin, offset,
            rotary_interleaved, own_backend,
        )  # fmt: skip
    if isinstance(k, Tensor):
        k = _quantize(
            k, "k", method, seed, cu_seqlens_k, options.max_seqlen_k, seqused_k, rotary_cos, rotary_sin, 0,
            rotary_interleaved, own_backend,
        )  # fmt: skip
    if isinstance(v, Tensor):
        v = _quantize(
            v, "v", method, None, cu_seqlens_k, options.max_seqlen_k, seqused_k, None, None, 0, False,
            own_backend,
        )  # fmt: skip
    extras = NO_EXTRAS
    if not (cu_seqlens_q is cu_seqlens_k is seqused_k is alibi_slopes is sink is None):
        extras = Extras(cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    fp8 = AttendOptions(q.dtype, q.shape[-1], True, method == "block")
    scales = Scales(*(scales_of(x) for x in (q, k, v)))
    out, lse = operators.attend(q.values, k.values, v.values, scales, extras, options, fp8)
    return (out, lse) if return_lse else out


def attend_descaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    extras: Extras,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of e4m3 tensors in rows, with FlashAttention-3's scales (batch, heads_kv); out bfloat16."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
        operators.refuse_gradient((name, x))
    scales = Scales(q_descale, k_descale, v_descale)
    return operators.attend(q, k, v, scales, extras, options, AttendOptions(torch.bfloat16, q.shape[-1]))


def agreed(
    given: dict[str, Any], method: str | None, hadamard: bool | None, seed: int | None
) -> tuple[str, int | None]:
    """(method, seed or None without transform) that the call's tensors share."""
    if hadamard is not None and type(hadamard) is not bool:
        raise TypeError(f"hadamard must be True, False or None, got {type(hadamard).__name__}")
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
            raise ValueError(f"q and k must share a transform, they have seeds {transformed} (None is none)")
        refused = hadamard is not None and hadamard != (shared is not None)
        if refused or (seed is not None and wanted != shared):
            got = f"hadamard={hadamard}, seed={seed}"
            raise ValueError(f"{name} was transformed with seed {shared} (None is none), got {got}")
        return method or "block", shared
    return method or "block", None if hadamard is False else wanted


def sequences(
    of: tuple[Any, ...], cu_seqlens: Tensor | None, max_seqlen: int | None, seqused: Tensor | None
) -> tuple[Tensor | None, int | None, Tensor | None]:
    """What was given, or else what the quantised ones of ``of`` came with."""
    for x in of:
        if isinstance(x, Quantized):
            cu_seqlens = x.cu_seqlens if cu_seqlens is None else cu_seqlens
            max_seqlen = x.max_seqlen if max_seqlen is None else max_seqlen
            seqused = x.seqused if seqused is None else seqused
    return cu_seqlens, max_seqlen, seqused


def _query_offset(
    q: Tensor,
    k: Tensor | Quantized,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> int | Tensor:
    """Position of the first query of each sequence: its keys less its queries."""
    if seqused_k is not None:
        lengths = seqused_k
    elif cu_seqlens_k is not None:
        lengths = cu_seqlens_k.diff()
    else:
        return k.shape[1] - q.shape[1]
    return lengths - (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff())


def scales_of(x: Quantized) -> Tensor:
    """As the kernels take them: of blocks, or (batch, heads)."""
    if x.method != "tensor":
        return x.scales
    batch = x.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return x.scales.expand(batch, x.shape[-2])
