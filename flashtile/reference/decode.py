"""Standard attention over a cache, with all scores in memory: the reference of the decoding functions.

The code is plain torch and computes one sequence after another, on any device.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from flashtile.checks.conversions import as_masking
from flashtile.problems.addresses import descales_of, destinations, locate, new_tokens
from flashtile.problems.decode import FP8, FP8_MAX, AppendOptions, AppendTensors, CacheTensors
from flashtile.problems.masking import positions
from flashtile.reference.attention import masked


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_k_new: int | None = None,
    rotary_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    qv: Tensor | None = None,
    mass: Tensor | None = None,
    upcast: torch.dtype | None = None,
    **options: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (out, lse, k_cache, v_cache) by definition; the caches are copies with k and v appended.

    The arguments are those of :func:`flashtile.flash_attn_with_kvcache`, ``options`` the other options of
    :class:`flashtile.problems.masking.Masking`. ``mass`` may have any dtype and is written. Appended keys and
    values are rounded to the cache's dtype, and rotated queries to q's dtype. Attention is then computed in
    ``upcast``, or in q's dtype if it is None. out has the same dtype. lse is float64 if ``upcast`` or q's
    dtype is float64, otherwise float32.
    """
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    masking = as_masking(causal, window_size, **options)
    lengths = cache_seqlens
    if k is not None and v is not None:
        assert cache_seqlens is not None
        tensors = AppendTensors(
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_seqlens=rotary_seqlens,
            k_descale=k_descale,
            v_descale=v_descale,
            q=q,
            cu_seqlens_q=cu_seqlens_q,
        )
        by_token = masking.hides_by_position
        appending = AppendOptions(
            max_seqlen_k_new=max_seqlen_k_new,
            rotary_interleaved=rotary_interleaved,
            rotate_q_by_token=by_token,
        )
        k_cache, v_cache = append(k_cache, v_cache, k, v, tensors, appending)
        if rotary_cos is not None:
            rotated = rotate_appended(q, cu_seqlens_q, tensors, rotary_interleaved, by_token)
            q_rows = q.flatten(0, -3).clone()
            q_rows[: len(rotated)] = rotated
            q = q_rows.view(q.shape)
        added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        lengths = cache_seqlens + added

    compute = q.dtype if upcast is None else upcast
    lse_dtype = torch.float64 if torch.float64 in (compute, q.dtype) else torch.float32
    if qv is not None:  # one product gives q k^T + qv v^T
        q = torch.cat([q, qv], -1)
    rows = q.flatten(0, -3)
    if cu_seqlens_q is None:
        starts = [b * q.shape[1] for b in range(q.shape[0] + 1)]
    else:
        starts = cu_seqlens_q.tolist()
    out = rows.new_zeros((*rows.shape[:-1], v_cache.shape[-1]), dtype=compute)
    lse = rows.new_full((rows.shape[1], rows.shape[0]), -torch.inf, dtype=lse_dtype)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    places = CacheTensors(cache_batch_idx=cache_batch_idx, block_table=block_table)
    for b, (start, end) in enumerate(pairwise(starts)):
        length = None if lengths is None else int(lengths[b])
        k_b = sequence(k_cache, b, length, places, k_descale, compute)
        v_b = sequence(v_cache, b, length, places, v_descale, compute)
        if qv is not None:
            k_b = torch.cat([k_b, v_b], -1)
        seqlen_q, seqlen_k = end - start, k_b.shape[0]
        leftpad = 0 if cache_leftpad is None else min(int(cache_leftpad[b]), seqlen_k)
        # Positions are counted from the first key, at which the first chunk begins.
        own = positions(seqlen_q, seqlen_k - leftpad)
        seen = masking.visible(own, range(-leftpad, seqlen_k - leftpad), q.device)
        if tree_mask is not None:
            mask = tree_mask if tree_mask.dim() == 2 else tree_mask[min(b, tree_mask.shape[0] - 1)]
            tree = min(seqlen_q, seqlen_k)
            seen[:, seqlen_k - tree :] = mask[:seqlen_q, seqlen_q - tree : seqlen_q]
        seen[:, :leftpad] = False
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
        attend = partial(
            masked, rows[start:end].to(compute), k_b, softmax_scale=scale, seen=seen, lse_dtype=lse_dtype,
            slopes=slopes, softcap=softcap, sink=sink,
        )  # fmt: skip
        out[start:end], lse[:, start:end] = attend(v_b)
        if mass is not None:
            ones = torch.eye(seqlen_k, dtype=compute, device=q.device)[:, None].expand(-1, k_b.shape[1], -1)
            p, _ = attend(ones)  # (rows, heads_q, keys)
            p = p.masked_fill(~seen[:, None], 0.0)  # a row with a NaN has NaN everywhere
            sums = p.to(mass.dtype).unflatten(1, (k_b.shape[1], -1)).sum((0, 2))
            at = torch.arange(seqlen_k, device=q.device)
            mass[locate(torch.full_like(at, b), at, k_cache, places)] += sums.T
    if cu_seqlens_q is not None:
        return out, lse, k_cache, v_cache
    unflat = q.shape[:2]
    return out.unflatten(0, unflat), lse.unflatten(1, unflat).transpose(0, 1), k_cache, v_cache


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> tuple[Tensor, Tensor]:
    """Append k and v to copies of the caches, and return (k_cache, v_cache)."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    token, row, offset = destinations(k_cache, k, tensors)
    k_rows, v_rows = (t.flatten(0, -3)[token] for t in (k, v))
    if tensors.rotary_cos is not None:
        k_rows = rotate_appended(k, tensors.cu_seqlens_k_new, tensors, options.rotary_interleaved)
    sequences = None if tensors.slot_mapping is not None else new_tokens(k, tensors.cu_seqlens_k_new)[0]
    for cache, new, descale in ((k_cache, k_rows, tensors.k_descale), (v_cache, v_rows, tensors.v_descale)):
        for i in range(len(row)):
            b = 0 if sequences is None else int(sequences[i])
            factor = None if descale is None else descales_of(descale, b, int(row[i]))
            cache[row[i], offset[i]] = quantized(new[i], factor, cache.dtype)
    return k_cache, v_cache


def quantized(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Divide x (..., heads, head_dim) by ``descale`` (..., heads), and round it to FP8.

    For other dtypes, return x.
    """
    if dtype != FP8:
        return x
    x = x.float() if descale is None else x.float() / descale.unsqueeze(-1)
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def sequence(
    cache: Tensor,
    b: int,
    length: int | None,
    tensors: CacheTensors,
    descale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the keys or values of sequence b, (length, heads_kv, head_dim), dequantised, in ``dtype``."""
    if length is None:
        length = cache.shape[1] * (1 if tensors.block_table is None else tensors.block_table.shape[1])
    position = torch.arange(length, device=cache.device)
    row, offset = locate(torch.full_like(position, b), position, cache, tensors)
    stored = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch cannot index FP8 on the CPU
    tokens = stored[row, offset].view(cache.dtype)
    if descale is None:
        return tokens.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = descales_of(descale, b, row)
    return (tokens.to(wide) * factor.to(wide).unsqueeze(-1)).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head by the angles of its token's position.

    The rotation is computed in float32 (float64 for x in float64) and rounded once to the dtype of x.

    Args:
        x: (tokens, heads, head_dim).
        cos, sin: (rows, rotary_dim / 2); row p holds the angles of position p.
        positions: (tokens,) int64.
        interleaved: pairs are elements (0, 1), (2, 3), ... (GPT-J); otherwise elements i and
            ``i + rotary_dim / 2`` (GPT-NeoX, Llama).
    """
    return turn(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., heads, head_dim). The cos and sin of the angles are (..., 1, rotary_dim / 2)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotary_dim = 2 * cos.shape[-1]
    c, s = cos.to(wide), sin.to(wide)
    part = x[..., :rotary_dim].to(wide)
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        rotated = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        rotated = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], -1)


def rotate_appended(
    x: Tensor, cu_seqlens: Tensor | None, tensors: AppendTensors, interleaved: bool, by_token: bool = True
) -> Tensor:
    """Apply rotary embedding to new keys or queries.

    With ``by_token``, row i of a sequence is rotated by the angles of position ``first + i``, where ``first``
    is the sequence's first new position. Otherwise all rows are rotated by the angles of ``first``.

    Returns:
        The rotated rows (rows, heads, head_dim), without the rows of x after the last sequence.
    """
    first = tensors.cache_seqlens if tensors.rotary_seqlens is None else tensors.rotary_seqlens
    assert first is not None
    assert tensors.rotary_cos is not None
    assert tensors.rotary_sin is not None
    sequence, number = new_tokens(x, cu_seqlens)
    positions = first.long()[sequence] + (number if by_token else 0)
    rows = x.flatten(0, -3)[: sequence.shape[0]]
    return rotate(rows, tensors.rotary_cos, tensors.rotary_sin, positions, interleaved)
