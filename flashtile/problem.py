"""One frozen description of an attention call, and every check of its arguments.

A :class:`Problem` says everything that decides how a call is computed (shapes, dtype, mask, options, device)
and nothing about its data. It is hashable: backends choose and keep compiled kernels by it.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNLIMITED = -1
"""A window side without a limit (FlashAttention's convention)."""

LOG2_E = math.log2(math.e)

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICE_TYPES = ("cuda", "cpu")
FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_LENGTH = 2**31 - 1
"""Lengths and windows are int32 in the kernels."""

PREFERENCE = ("hopper", "portable", "cpu")
"""Backends in the order in which they are asked. An explicit ``backend=`` never falls back."""


class Options(NamedTuple):
    """The arguments of a call that are not tensors, hashable so that launches can be kept by them.

    Of exactly these types: :func:`flashtile.arguments.make_options` sees to it.
    """

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0
    deterministic: bool = False
    backend: str | None = None


class Extras(NamedTuple):
    """The tensors that a call may have beside q, k and v; None for each that it has not."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None


NO_EXTRAS = Extras()
"""The one value that calls with q, k and v alone pass: known by identity, which costs less than looking."""


class Results:
    """What follows from a description of a call for its results. No fields of its own."""

    batch: int
    seqlen_q: int
    total_q: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_v: int
    dtype: torch.dtype
    varlen: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.total_q, self.num_heads_q, self.head_dim_v)
        return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.num_heads_q, self.total_q)
        return (self.batch, self.num_heads_q, self.seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Problem(Results):
    """What a call computes. Lengths are in tokens; a window side of -1 is unlimited.

    ``causal`` is folded into the window (``window_right = 0``). Masks are aligned to the bottom right: query
    row ``i`` of a sequence sees keys from ``i + seqlen_k - seqlen_q - window_left`` to
    ``i + seqlen_k - seqlen_q + window_right``, both included.
    """

    batch: int
    seqlen_q: int  # the longest sequence when varlen
    seqlen_k: int
    total_q: int  # rows of q in memory: batch * seqlen_q, or q.shape[0] when varlen
    total_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    varlen: bool = False
    seqused_k: bool = False
    deterministic: bool = False
    tma_obstacle: str | None = None
    """Why the tensor memory accelerator of Hopper GPUs cannot address q, k or v as they lie."""

    @property
    def causal(self) -> bool:
        return self.window_right == 0 and self.window_left == UNLIMITED

    def effective_window(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """(left, right) of the window, a side that hides no key at these lengths as unlimited (-1)."""
        return (
            UNLIMITED if self.window_left >= seqlen_k - 1 else self.window_left,
            UNLIMITED if self.window_right >= seqlen_q - 1 else self.window_right,
        )

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Extras = NO_EXTRAS,
        options: Options = Options(),  # noqa: B008 - immutable
    ) -> Problem:
        """Check every argument and describe the call; see :func:`check_call` for the errors."""
        check_call(q, k, v, extras, options)
        cu_seqlens_q = extras.cu_seqlens_q
        varlen = cu_seqlens_q is not None
        if cu_seqlens_q is not None:
            assert options.max_seqlen_q is not None
            assert options.max_seqlen_k is not None
            batch = cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = int(options.max_seqlen_q), int(options.max_seqlen_k)
            total_q, total_k = q.shape[0], k.shape[0]
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
            total_q, total_k = batch * seqlen_q, batch * seqlen_k
        head_dim = q.shape[-1]
        scale = options.softmax_scale
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            total_q=total_q,
            total_k=total_k,
            num_heads_q=q.shape[-2],
            num_heads_kv=k.shape[-2],
            head_dim=head_dim,
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            device=q.device,
            softmax_scale=head_dim**-0.5 if scale is None else float(scale),
            window_left=int(options.window_left),
            window_right=0 if options.causal else int(options.window_right),
            softcap=float(options.softcap),
            alibi=extras.alibi_slopes is not None,
            sink=extras.sink is not None,
            varlen=varlen,
            seqused_k=extras.seqused_k is not None,
            deterministic=bool(options.deterministic),
            tma_obstacle=find_tma_obstacle(q, k, v, extras.seqused_k is not None and not varlen),
        )


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    options: Options,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Raise for a call that no backend could compute. Looks at shapes and types only, never at data.

    Args:
        dtypes: that q, k and v may have.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, stride, device or number is not allowed.
        NotImplementedError: a device or head size that flashtile does not serve.
    """
    check_types(q, k, v, extras)
    cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink = extras
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    rank, layout = (3, "(total, heads, head_dim)") if varlen else (4, "(batch, seqlen, heads, head_dim)")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, rank, layout, q, dtypes)
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"v has {v.shape[-2]} heads, but k has {k.shape[-2]}: they must be equal")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"v has leading shape {tuple(v.shape[:-2])}, but k has {tuple(k.shape[:-2])}: they must be equal"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, but q has {q.shape[-1]}: they must be equal")
    if not varlen and q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, but q has {q.shape[0]}: they must be equal")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q == 0:
        raise ValueError(f"q has {heads_q} heads and k has {heads_kv}: both need at least one")
    if heads_q % heads_kv != 0:
        raise ValueError(f"q has {heads_q} heads, which must be a multiple of the {heads_kv} heads of k")
    if varlen:
        _check_varlen(cu_seqlens_q, cu_seqlens_k, q, options)
    elif options.max_seqlen_q is not None or options.max_seqlen_k is not None:
        name = "max_seqlen_q" if options.max_seqlen_q is not None else "max_seqlen_k"
        raise ValueError(f"{name} must be None without cu_seqlens_q and cu_seqlens_k, got an int")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if seqused_k is not None:
        _check_seqused(seqused_k, q, batch)
    if alibi_slopes is not None:
        _check_alibi(alibi_slopes, q, batch)
    if sink is not None:
        _check_sink(sink, q)
    _check_options(options)


def find_tma_obstacle(q: Tensor, k: Tensor, v: Tensor, ends_early: bool) -> str | None:
    """Why TMA cannot address the tensors: it takes pointers and strides in multiples of 16 bytes.

    Args:
        ends_early: sequences of a dense k and v end early (``seqused_k``). Then they are addressed as rows
            behind one another, so that sequences must be whole rows apart.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        bytes_of = tensor.element_size()
        try:
            start: int | torch.SymInt = tensor.data_ptr()
        except RuntimeError:  # a fake tensor
            start = tensor.storage_offset() * bytes_of
        if start % 16:
            return f"{name} must start at a multiple of 16 bytes for TMA"
        strides = [tensor.stride(i) for i in range(tensor.dim() - 1) if tensor.shape[i] > 1]
        for stride in strides:
            if stride <= 0 or stride * bytes_of % 16:
                got = tuple(tensor.stride())
                return f"{name} must have positive strides in multiples of 16 bytes for TMA, got {got}"
        if ends_early and name != "q" and tensor.shape[0] > 1 and tensor.stride(0) % max(tensor.stride(1), 1):
            return (
                f"{name} must have sequences whole rows apart for TMA with seqused_k, got {tensor.stride()}"
            )
    if ends_early and k.shape[0] > 1 and k.stride(0) * v.stride(1) != v.stride(0) * k.stride(1):
        return "k and v must have their sequences equally many rows apart for TMA with seqused_k"
    return None


def check_types(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
    """Raise TypeError for what is not a dense tensor."""
    check_dense("q", q)
    check_dense("k", k)
    check_dense("v", v)
    for name, tensor in zip(Extras._fields, extras, strict=True):
        if tensor is not None:
            check_dense(name, tensor)
    slopes = extras.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "alibi_slopes requires grad, but no gradient is computed for it: it must be detached"
        )


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for what is not a tensor, and for sparse and nested ones."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}: they must be on one device")


def _check_tensor(
    name: str, tensor: Tensor, rank: int, layout: str, q: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, but q has {q.dtype}: they must be equal")
    if tensor.device.type not in (*DEVICE_TYPES, "meta"):
        raise NotImplementedError(f"{name} is on {tensor.device}: flashtile serves cuda and cpu tensors")
    _check_device(name, tensor, q)
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name} has head_dim 0: it must be from 1 to {MAX_HEAD_DIM}")
    if tensor.shape[-1] > MAX_HEAD_DIM:
        head_dim = tensor.shape[-1]
        raise NotImplementedError(f"{name} has head_dim {head_dim}: it must be from 1 to {MAX_HEAD_DIM}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}: "
            f"call {name}.contiguous()"
        )


def _check_varlen(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, q: Tensor, options: Options
) -> None:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens is None:
            raise TypeError(f"{name} must be an int32 torch.Tensor like its partner, got None")
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1:
            raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"{name} must have at least one entry (batch + 1), got none")
        if cu_seqlens.shape[0] > 1 and cu_seqlens.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous (stride 1), got stride {cu_seqlens.stride(0)}")
        _check_device(name, cu_seqlens, q)
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries, but cu_seqlens_q has "
            f"{cu_seqlens_q.shape[0]}: both must have batch + 1"
        )
    for name, length in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", options.max_seqlen_k)):
        if length is None:
            raise TypeError(f"{name} must be an int beside cu_seqlens, got None")
        _check_range(name, length, 0, f"from 0 to {MAX_LENGTH}")


def _check_seqused(seqused_k: Tensor, q: Tensor, batch: int) -> None:
    if seqused_k.dtype != torch.int32:
        raise TypeError(f"seqused_k must be int32, got {seqused_k.dtype}")
    _check_device("seqused_k", seqused_k, q)
    if tuple(seqused_k.shape) != (batch,):
        raise ValueError(f"seqused_k must have shape (batch,) = {(batch,)}, got {tuple(seqused_k.shape)}")
    if batch > 1 and seqused_k.stride(0) != 1:
        raise ValueError(f"seqused_k must be contiguous (stride 1), got stride {seqused_k.stride(0)}")


def _check_sink(sink: Tensor, q: Tensor) -> None:
    if sink.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"sink must be float32 or have the dtype of q ({q.dtype}), got {sink.dtype}")
    _check_device("sink", sink, q)
    heads = q.shape[-2]
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sink must have shape (heads_q,) = {(heads,)}, got {tuple(sink.shape)}")
    if heads > 1 and sink.stride(0) != 1:
        raise ValueError(
            f"sink must be contiguous (stride 1), got stride {sink.stride(0)}: call sink.contiguous()"
        )


def _check_alibi(alibi_slopes: Tensor, q: Tensor, batch: int) -> None:
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {alibi_slopes.dtype}")
    _check_device("alibi_slopes", alibi_slopes, q)
    heads = q.shape[-2]
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must have shape (heads,) = {(heads,)} or (batch, heads) = {(batch, heads)}, "
            f"got {tuple(alibi_slopes.shape)}"
        )
    if alibi_slopes.shape[-1] > 1 and alibi_slopes.stride(-1) != 1:
        raise ValueError(
            "alibi_slopes must have stride 1 in its last dimension, "
            f"got strides {tuple(alibi_slopes.stride())}: call alibi_slopes.contiguous()"
        )


def _check_options(options: Options) -> None:
    scale, softcap = options.softmax_scale, options.softcap
    if scale is not None and not abs(scale) <= FLOAT32_MAX:  # so written, it refuses NaN too
        raise ValueError(f"softmax_scale must be finite in float32, got {scale}")
    if not 0 <= softcap <= FLOAT32_MAX:
        raise ValueError(f"softcap must be finite in float32 and at least 0 (0 turns it off), got {softcap}")
    for name, side in (("window_size[0]", options.window_left), ("window_size[1]", options.window_right)):
        _check_range(name, side, UNLIMITED, f"from -1 (unlimited) to {MAX_LENGTH}")
    if options.backend is not None and options.backend not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {options.backend!r}")


def _check_range(name: str, value: int, least: int, allowed: str) -> None:
    """Under tracing, a length that comes from data (``.item()``) is checked when the graph runs."""
    if isinstance(value, torch.SymInt):
        torch._check(value >= least, lambda: f"{name} must be {allowed}")
    elif not least <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def debug_checks() -> bool:
    """Whether ``FLASHTILE_DEBUG=1`` asks for checks that read data from the device (and so synchronise)."""
    return os.environ.get("FLASHTILE_DEBUG", "0") == "1"


def check_lengths(q: Tensor, k: Tensor, extras: Extras, options: Options) -> None:
    """Raise ValueError for lengths that no sequences of these tensors can have.

    Reads the data: done for every CPU call, and for CUDA calls only under ``FLASHTILE_DEBUG=1``.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_k, *_ = extras
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is not None
        assert options.max_seqlen_q is not None
        assert options.max_seqlen_k is not None
        check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], options.max_seqlen_q)
        check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], options.max_seqlen_k)
    if seqused_k is not None:
        used = seqused_k.tolist()
        lengths = [k.shape[1]] * len(used) if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
        for b, (count, length) in enumerate(zip(used, lengths, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(
                    f"seqused_k must be from 0 to the {length} keys of sequence {b}, got {count}"
                )


def check_offsets(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Raise unless ``cu_seqlens`` rises from 0 up to ``total`` in steps of at most ``max_seqlen``."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} must start with 0, got {offsets[0]}")
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {start} then {end} at entry {i + 1}")
        if end - start > max_seqlen:
            raise ValueError(
                f"{name} has a sequence of {end - start} tokens (number {i}), "
                f"longer than {name.replace('cu_seqlens', 'max_seqlen')} = {max_seqlen}"
            )
    if offsets[-1] > total:
        raise ValueError(f"{name} must end within the tensor's {total} tokens, got {offsets[-1]}")
