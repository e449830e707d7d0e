"""``flash_attn.layers.rotary``: rotary embedding (Su et al. 2021, arXiv:2104.09864) in plain torch.

``flash_attn_with_kvcache`` and ``flashtile.fp8`` fuse the rotation. These functions rotate before attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.caches import outlives_modes
from flashtile.checks.arguments import (
    as_int_within,
    check_dense,
    check_device,
    check_dtype,
    check_offsets,
    check_tensor,
    renaming,
)
from flashtile.checks.conversions import as_offsets, check_flag, check_tuning
from flashtile.compat.flash_attn_interface import split_qkv
from flashtile.problems.common import MAX_LENGTH
from flashtile.reference.decode import turn

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head in x by the angles of the token's position.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``.
        cos, sin: (positions, rotary_dim / 2).
        interleaved: whether the elements of a pair are neighbours (GPT-J). False: they are rotary_dim / 2
            apart (Llama).
        inplace: write into x, and return it.
        seqlen_offsets: int or (batch,), the position of a sequence's first token. With a tensor, or with
            ``cu_seqlens``, a token whose position has no row in cos is not rotated.
        cu_seqlens: (batch + 1,) int32 offsets of packed sequences, or None.
        max_seqlen: ignored; FlashAttention requires it with ``cu_seqlens``.

    Returns:
        The rotated tensor, in the shape of x.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: cos and sin differ in shape, are too wide, or have too few rows for an int offset without
            ``cu_seqlens``.
    """
    _check_tables(x, cos, sin, interleaved, 4 if cu_seqlens is None else 3)
    check_flag("inplace", inplace)
    check_tuning(max_seqlen=max_seqlen)
    if inplace:
        _check_writable("x", x)
    if cos.dim() != 2:
        raise ValueError(f"cos and sin must have shape (positions, rotary_dim / 2), got {tuple(cos.shape)}")
    rows, batch = cos.shape[0], x.shape[0]
    cu_seqlens = as_offsets(cu_seqlens)
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, x)
        batch = cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor):
        dtypes = torch.int32, torch.int64
        check_tensor("seqlen_offsets", seqlen_offsets, ((batch,),), "(batch,)", x, dtypes, any_strides=True)
    else:
        seqlen_offsets = as_int_within("seqlen_offsets", seqlen_offsets, 0, MAX_LENGTH)
    tokens = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is not None:
        sequence = torch.bucketize(tokens, cu_seqlens[1:].long(), right=True)
        offsets = seqlen_offsets
        if isinstance(offsets, Tensor) and batch:
            offsets = offsets[sequence.clamp_max(batch - 1)]
        positions = tokens - cu_seqlens.long()[sequence.clamp_max(batch)] + (offsets if batch else 0)
    elif isinstance(seqlen_offsets, Tensor):
        positions = tokens + seqlen_offsets[:, None]
    else:
        if seqlen_offsets + x.shape[-3] > rows:
            raise ValueError(
                f"cos and sin must have at least {seqlen_offsets + x.shape[-3]} rows, got {rows}"
            )
        positions = tokens + seqlen_offsets
    # Positions without a row use an appended last row, which rotates by 0.
    positions = torch.where((positions < 0) | (positions > rows), rows, positions)
    cos, sin = torch.cat([cos, torch.ones_like(cos[:1])]), torch.cat([sin, torch.zeros_like(sin[:1])])
    out = turn(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x (batch, seqlen, heads, head_dim) by cos and sin ([batch,] seqlen, rotary_dim / 2)."""
    _check_tables(x, cos, sin, interleaved, 4)
    if tuple(cos.shape[:-1]) not in ((x.shape[1],), (1, x.shape[1]), (x.shape[0], x.shape[1])):
        raise ValueError(
            f"cos and sin must have shape ([batch,] seqlen, rotary_dim / 2) for x {tuple(x.shape)}, "
            f"got {tuple(cos.shape)}"
        )
    return turn(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rank: int) -> None:
    """Check that x has ``rank`` dimensions, and that cos and sin are rotary tables that fit its head_dim."""
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_dense(name, tensor)
        check_dtype(name, tensor)
        check_device(name, tensor, x)
    check_flag("interleaved", interleaved)
    if x.dim() != rank:
        raise ValueError(f"x must have {rank} dimensions, got shape {tuple(x.shape)}")
    if cos.dim() < 2 or sin.shape != cos.shape or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin must have shape (positions, rotary_dim / 2), rotary_dim at most {x.shape[-1]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def _check_writable(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(f"{name} must not be a leaf that requires grad, because {name} is written in place")


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys within qkv, in place.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 heads_kv, head_dim).
        cos, sin, interleaved, seqlen_offsets: as for :func:`apply_rotary_emb`.
        cos_k, sin_k: tables of the keys, if they differ from those of the queries (XPos).
        num_heads_q: number of query heads, required for the second shape of qkv.

    Raises:
        ValueError: qkv has another shape, or num_heads_q does not fit its heads.
    """
    q, k, _ = split_qkv(qkv, num_heads_q)
    _check_writable("qkv", qkv)
    names = {"x": "qkv"}
    with renaming(**names):
        apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    if cos_k is None:
        cos_k = cos
    else:
        names["cos"] = "cos_k"
    if sin_k is None:
        sin_k = sin
    else:
        names["sin"] = "sin_k"
    with renaming(**names):
        apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys within kv (batch, seqlen, 2, heads, head_dim), in place."""
    check_dense("kv", kv)
    _check_writable("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must have shape (batch, seqlen, 2, heads, head_dim), got {tuple(kv.shape)}")
    with renaming(x="kv"):
        apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of packed queries, keys and values, with its tables of cos and sin.

    Args:
        dim: rotary_dim, the number of rotated elements of a head.
        base: base of the geometric series of frequencies.
        interleaved: as for :func:`apply_rotary_emb`.
        scale_base: scale base of XPos (Sun et al. 2022, arXiv:2212.10554), for example 512; None: no XPos.
        device: device of the frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** -(even / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make tables for positions below ``seqlen``.

        They are computed in float32 and rounded to ``dtype``, even in a module cast to another dtype.
        """
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and (kept.device, kept.dtype) == (device, dtype)
            and (torch.compiler.is_dynamo_compiling() or outlives_modes(kept))
        ):
            return
        self._seq_len_cached = seqlen
        with torch.inference_mode(False):  # a later call may need the tables for its backward pass
            self._make_tables(seqlen, device, dtype)

    def _make_tables(self, seqlen: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (positions - seqlen // 2) / self.scale_base
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        scale = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place. Return qkv, or (q, kv) if ``kv`` is given.

        Args:
            qkv: as for :func:`apply_rotary_emb_qkv_`; with ``kv``, the queries (batch, seqlen, heads,
                head_dim).
            kv: (batch, seqlen, 2, heads, head_dim).
            seqlen_offset: int or (batch,), the position of a sequence's first token.
            max_seqlen: number of positions, required if ``seqlen_offset`` is a tensor.
            num_heads_q: as for :func:`apply_rotary_emb_qkv_`.
        """
        seqlen = qkv.shape[1]
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(seqlen + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen must be given if seqlen_offset is a tensor, got None")
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        if kv is None:
            tables = cos, sin, cos_k, sin_k
            return apply_rotary_emb_qkv_(qkv, *tables, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
