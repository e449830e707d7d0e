"""One frozen description of an attention call, and every check of its arguments.

A :class:`Problem` says everything that decides how a call is computed (shapes, dtype, mask, options, device)
and nothing about its data. It is hashable: backends choose and keep compiled kernels by it.
"""

from __future__ import annotations

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


class Options(NamedTuple):
    """The arguments of a call that are not tensors, hashable so that launches can be kept by them."""

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0
    deterministic: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class Problem:
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
    varlen: bool = False
    deterministic: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def causal(self) -> bool:
        return self.window_right == 0 and self.window_left == UNLIMITED

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

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        options: Options = Options(),  # noqa: B008 - immutable
    ) -> Problem:
        """Check every argument and describe the call; see :func:`check_call` for the errors."""
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
        varlen = cu_seqlens_q is not None
        if cu_seqlens_q is not None:
            assert options.max_seqlen_q is not None and options.max_seqlen_k is not None
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
            alibi=alibi_slopes is not None,
            varlen=varlen,
            deterministic=bool(options.deterministic),
        )


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    options: Options,
) -> None:
    """Raise for a call that no backend could compute. Looks at shapes and types only, never at data.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, stride, device or number is not allowed.
        NotImplementedError: a device or head size that flashtile does not serve.
    """
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    rank, layout = (3, "(total, heads, head_dim)") if varlen else (4, "(batch, seqlen, heads, head_dim)")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, rank, layout, q)
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
        raise ValueError("max_seqlen_q and max_seqlen_k go with cu_seqlens_q and cu_seqlens_k, which are missing")
    if alibi_slopes is not None:
        _check_alibi(alibi_slopes, q, cu_seqlens_q)
    _check_options(options)


def _check_tensor(name: str, tensor: Tensor, rank: int, layout: str, q: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, but q has {q.dtype}: they must be equal")
    if tensor.device.type not in (*DEVICE_TYPES, "meta"):
        raise NotImplementedError(f"{name} is on {tensor.device}: flashtile serves cuda and cpu tensors")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}: they must be on one device")
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name} has head_dim 0: it must be from 1 to {MAX_HEAD_DIM}")
    if tensor.shape[-1] > MAX_HEAD_DIM:
        raise NotImplementedError(f"{name} has head_dim {tensor.shape[-1]}: it must be from 1 to {MAX_HEAD_DIM}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}: "
            f"call {name}.contiguous()"
        )


def _check_varlen(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, q: Tensor, options: Options) -> None:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(f"{name} must be an int32 torch.Tensor, got {type(cu_seqlens).__name__}")
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1:
            raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"{name} must have at least one entry (batch + 1), got none")
        if cu_seqlens.shape[0] > 1 and cu_seqlens.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous, got stride {cu_seqlens.stride(0)}")
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name} is on {cu_seqlens.device}, but q is on {q.device}: they must be on one device")
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries, but cu_seqlens_q has {cu_seqlens_q.shape[0]}: "
            "both are batch + 1"
        )
    for name, length in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", options.max_seqlen_k)):
        if length is None or isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {type(length).__name__}")
        if length < 0:
            raise ValueError(f"{name} must be at least 0, got {length}")


def _check_alibi(alibi_slopes: Tensor, q: Tensor, cu_seqlens_q: Tensor | None) -> None:
    if not isinstance(alibi_slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a torch.Tensor, got {type(alibi_slopes).__name__}")
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {alibi_slopes.dtype}")
    if alibi_slopes.device != q.device:
        raise ValueError(f"alibi_slopes is on {alibi_slopes.device}, but q is on {q.device}: they must be on one device")
    if alibi_slopes.requires_grad:
        raise NotImplementedError("alibi_slopes requires grad, but no gradient is computed for it: detach it")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    allowed = ((q.shape[-2],), (batch, q.shape[-2]))
    if tuple(alibi_slopes.shape) not in allowed:
        raise ValueError(
            f"alibi_slopes must have shape (heads,) = {allowed[0]} or (batch, heads) = {allowed[1]}, "
            f"got {tuple(alibi_slopes.shape)}"
        )
    if alibi_slopes.stride(-1) != 1 and alibi_slopes.shape[-1] > 1:
        raise ValueError(f"alibi_slopes must have stride 1 in its last dimension, got {tuple(alibi_slopes.stride())}")


def _check_options(options: Options) -> None:
    scale = options.softmax_scale
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"softmax_scale must be a number or None, got {type(scale).__name__}")
        if not math.isfinite(scale):
            raise ValueError(f"softmax_scale must be finite, got {scale}")
    softcap = options.softcap
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if not math.isfinite(softcap) or softcap < 0:
        raise ValueError(f"softcap must be finite and at least 0 (0 turns it off), got {softcap}")
    for name, flag in (("causal", options.causal), ("deterministic", options.deterministic)):
        if not isinstance(flag, (bool, int)):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    for name, side in (("window_size[0]", options.window_left), ("window_size[1]", options.window_right)):
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {type(side).__name__}")
        if side < UNLIMITED:
            raise ValueError(f"{name} must be at least -1 (-1 is unlimited), got {side}")


def debug_checks() -> bool:
    """Whether ``FLASHTILE_DEBUG=1`` asks for checks that read data from the device (and so synchronise)."""
    return os.environ.get("FLASHTILE_DEBUG", "0") == "1"


def check_cu_seqlens_values(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Raise ValueError unless ``cu_seqlens`` rises from 0 within ``total`` and no step exceeds ``max_seqlen``.

    Reads the data: done for every CPU call, and for CUDA calls only under ``FLASHTILE_DEBUG=1``.
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} must start with 0, got {offsets[0]}")
    for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {start} then {end} at entry {i + 1}")
        if end - start > max_seqlen:
            raise ValueError(
                f"{name} has a sequence of {end - start} tokens (number {i}), "
                f"longer than max_seqlen_{name[-1]} = {max_seqlen}"
            )
    if offsets[-1] > total:
        raise ValueError(f"{name} must end within the tensor's {total} tokens, got {offsets[-1]}")
