"""Decode context parallelism: decoding over a KV cache whose tokens are interleaved over ranks.

Each rank attends to its own tokens, and the partial results are merged by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api.decode import append_kvcache, flash_attn_combine
from flashtile.checks.arguments import (
    as_int_within,
    check_choice,
    check_dense,
    check_device,
    check_int32,
    check_score_options,
)
from flashtile.checks.conversions import as_masking, as_seconds, check_flag, make_options, with_unit_stride
from flashtile.checks.decode import check_cache
from flashtile.operators.decode import DECODE
from flashtile.parallel.ranks import TIMEOUT, Ranks, as_bytes, num_bytes, ranks_of
from flashtile.parallel.symmetric import Shared, check_symmetric, shared_memory
from flashtile.problems.addresses import locate
from flashtile.problems.common import MAX_LENGTH
from flashtile.problems.decode import CacheTensors, DecodeOptions, capacity

MERGES = ("allgather", "reduce_scatter", "symmetric")


def own_tokens(lengths: Tensor, rank: int, size: int, interleave: int = 1) -> Tensor:
    """Return the number of tokens of each sequence that are on a rank, in the shape of ``lengths``.

    Token p is on rank ``p // interleave % size``. Its index among the tokens of this rank is
    ``p // (interleave * size) * interleave + p % interleave``.

    Args:
        lengths: integers of any shape, the number of tokens of each sequence on all ranks together.
        rank, size: this rank's number, and the size of the group.
        interleave: number of consecutive tokens on one rank.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> flashtile.parallel.own_tokens(torch.tensor([10]), rank=1, size=4)  # tokens 1, 5 and 9
        tensor([3])
    """
    check_dense("lengths", lengths)
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    size = as_int_within("size", size, 1, MAX_LENGTH)
    rank = as_int_within("rank", rank, 0, size - 1)
    interleave = as_int_within("interleave", interleave, 1, MAX_LENGTH)
    if interleave == 1:  # two kernels rather than six on a GPU, where launches dominate
        return (lengths + (size - 1 - rank)) // size
    turn = interleave * size
    return lengths // turn * interleave + (lengths % turn - rank * interleave).clamp(0, interleave)


def context_parallel_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    group: Any = None,
    interleave: int = 1,
    merge: str = "allgather",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    timeout: float = TIMEOUT,
    backend: str | None = None,
) -> Tensor | Any:
    """Attend to a KV cache whose tokens are interleaved over ranks, after appending new tokens to it.

    All ranks of the group call this together. Each computes :func:`flashtile.flash_attn_with_kvcache` over
    its own tokens. Partial results are float32 until they are merged. Nothing is read on the host, so a step
    can be captured in a CUDA graph after its first call.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), the same on all ranks: the last tokens of each sequence.
        k_cache, v_cache: this rank's own tokens (:func:`flashtile.parallel.own_tokens`), dense or in pages,
            as for :func:`flashtile.flash_attn_with_kvcache`.
        k, v: (batch, seqlen_new, heads_kv, head_dim) and (..., head_dim_v), the same on all ranks. These new
            tokens are appended before attention; each is written by the rank to which it belongs. None:
            nothing is appended. Dense caches must be contiguous.
        cache_seqlens: (batch,) int32, tokens of each *whole* sequence, on all ranks together, without the new
            ones.
        block_table: (batch, max_blocks) int32, this rank's pages, including those for the new tokens. None:
            the cache is dense.
        group: the process group; None is the default one.
        interleave: number of consecutive tokens on one rank.
        merge: how partial results are merged.

            * "allgather": every rank gets the output of all heads.
            * "reduce_scatter": rank r gets the output of the r-th part of the query heads. The number of
              query heads must be a multiple of the number of ranks.
            * "symmetric": as "allgather", but one kernel exchanges and merges the partial results in torch's
              symmetric memory. This requires NVIDIA GPUs of one host that can map each other's memory. The
              first call with these sizes must not be captured in a CUDA graph. Calls of one group must run
              one after another on the GPU, for example on one stream, and in the same order on all ranks.
              The memory is kept until the group is deleted.
        causal: query i of a sequence of ``length`` tokens sees the keys up to position
            ``length - seqlen_q + i``. False: every query sees all keys.
        sink: (heads_q,), the same on all ranks, or None.
        softmax_scale, softcap, k_descale, v_descale, backend: as for
            :func:`flashtile.flash_attn_with_kvcache`.
        return_lse: also return the log-sum-exp.
        timeout: seconds to wait for the other ranks; 600 by default.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q, where heads is heads_q, or this rank's
        part of them with "reduce_scatter". With ``return_lse``, (out, lse) with lse (batch, heads, seqlen_q).

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is invalid or not supported; the message names
            it. ValueError is also raised if ranks disagree on an argument.
        RuntimeError: a rank has ended or has not made this call within ``timeout``, or the first call with
            merge="symmetric" is within the capture of a graph.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> k_cache, v_cache = torch.zeros(2, 3, 512, 2, 64).unbind()  # 512 tokens on each rank
        >>> lengths = torch.tensor([0, 17, 250], dtype=torch.int32)
        >>> q = torch.randn(3, 1, 8, 64)
        >>> k, v = torch.randn(2, 3, 1, 2, 64).unbind()
        >>> out = flashtile.parallel.context_parallel_decode(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths
        ... )
        >>> out.shape, torch.equal(k_cache[1, 17], k[1, 0])
        (torch.Size([3, 1, 8, 64]), True)
        >>> dist.destroy_process_group()
    """
    check_flag("return_lse", return_lse)
    check_dense("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions (batch, seqlen_q, heads, head_dim), got {tuple(q.shape)}")
    batch, seqlen_q, heads, _ = q.shape
    check_dense("cache_seqlens", cache_seqlens)
    check_int32("cache_seqlens", cache_seqlens, (batch,), "(batch,)", q)
    interleave = as_int_within("interleave", interleave, 1, MAX_LENGTH)
    check_choice("merge", merge, MERGES)
    timeout = as_seconds("timeout", timeout)
    if merge == "symmetric":
        check_symmetric(q)
        check_dense("v_cache", v_cache)
    scores = make_options(as_masking(causal), softmax_scale=softmax_scale, softcap=softcap, backend=backend)
    check_score_options(scores)
    check_cache(q, k_cache, v_cache, block_table)
    if k is not None or v is not None:
        _check_new(q, k, v)
    ranks = ranks_of(group)
    if merge == "reduce_scatter" and heads % ranks.size:
        raise ValueError(
            f"q must have a multiple of {ranks.size} heads for merge='reduce_scatter', got {heads}"
        )
    same = {
        "the shape of q": tuple(q.shape), "dtype": str(q.dtype), "interleave": interleave, "merge": merge,
        "new tokens": None if k is None else tuple(k.shape), "sink": sink is not None, "causal": causal,
        "softmax_scale": scores.softmax_scale, "softcap": scores.softcap,
    }  # fmt: skip
    if not q.is_cuda:  # reading lengths on a GPU would synchronise
        same["cache_seqlens"] = tuple(cache_seqlens.tolist())
    ranks.agree(same, {}, timeout, q.device)
    shared = None
    if merge == "symmetric" and ranks.size > 1:
        shared = shared_memory(ranks, batch * seqlen_q * heads, v_cache.shape[-1], q.device)
    lengths = cache_seqlens
    if k is not None and v is not None:
        descales = (k_descale, v_descale)
        _append(ranks, k_cache, v_cache, k, v, lengths, block_table, interleave, descales, backend)
        lengths = lengths + k.shape[1]
    rows, table, own = with_unit_stride(q), block_table, CacheTensors()
    if seqlen_q > 1:  # each query becomes a sequence, which ends at the last key that it sees
        of_rows = torch.arange(seqlen_q, dtype=torch.int32, device=q.device) + 1 - seqlen_q
        lengths = lengths[:, None] + (of_rows if causal else torch.zeros_like(of_rows))
        lengths, rows = lengths.clamp(min=0).flatten(), rows.flatten(0, 1).unsqueeze(1)
        if block_table is None:
            index = torch.arange(batch, dtype=torch.int32, device=q.device)
            own = own._replace(cache_batch_idx=index.repeat_interleave(seqlen_q))
        else:
            table = block_table.repeat_interleave(seqlen_q, dim=0)
    own = own._replace(
        cache_seqlens=own_tokens(lengths, ranks.rank, ranks.size, interleave), block_table=table,
        sink=sink if ranks.rank == 0 else None, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    options = DecodeOptions(
        softmax_scale=scores.softmax_scale, softcap=scores.softcap, partial=True, backend=backend
    )
    out, lse = DECODE((rows, k_cache, v_cache), own, options)
    out = out.view(batch, seqlen_q, heads, out.shape[-1])
    out, lse = _merged(ranks, out, lse.view(batch, seqlen_q, heads), merge, shared, timeout, q.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _check_new(q: Tensor, k: Any, v: Any) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor is None:
            raise ValueError(f"{name} must be given together with {'v' if name == 'k' else 'k'}, got None")
        check_dense(name, tensor)
        check_device(name, tensor, q)
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have shape (batch, seqlen_new, heads_kv, head_dim) with batch = {q.shape[0]}, "
                f"got {tuple(tensor.shape)}"
            )


def _append(
    ranks: Ranks,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    block_table: Tensor | None,
    interleave: int,
    descales: tuple[Tensor | None, Tensor | None],
    backend: str | None,
) -> None:
    """Write the new tokens that belong to this rank into its caches."""
    position = before.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    turn = interleave * ranks.size
    own = position // interleave % ranks.size == ranks.rank
    index = position // turn * interleave + position % interleave
    most = capacity(k_cache, block_table)
    sequence = torch.arange(len(before), device=k.device)[:, None]
    row, offset = locate(sequence, index.clamp(max=most - 1), k_cache, CacheTensors(block_table=block_table))
    slots = torch.where(own & (index < most), row * k_cache.shape[1] + offset, -1)
    append_kvcache(
        k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slot_mapping=slots.flatten(),
        k_descale=descales[0], v_descale=descales[1], backend=backend,
    )  # fmt: skip


def _merged(
    ranks: Ranks,
    out: Tensor,
    lse: Tensor,
    merge: str,
    shared: Shared | None,
    timeout: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Merge this rank's out and lse with those of the other ranks.

    Args:
        out: (batch, seqlen_q, heads, head_dim_v).
        lse: (batch, seqlen_q, heads).

    Returns:
        out in ``dtype``, and lse (batch, seqlen_q, heads). With "reduce_scatter" they have only this rank's
        part of the heads.
    """
    if shared is not None:
        from flashtile.parallel.exchange import exchange

        out, lse = exchange(out.contiguous(), lse.contiguous(), *shared, dtype, timeout)
        return out, lse.transpose(1, 2)
    heads = out.shape[2] // (ranks.size if merge == "reduce_scatter" else 1)
    if not out.numel():  # no queries: all ranks know that there is nothing to send
        return out[:, :, :heads].to(dtype), lse[:, :, :heads]
    if merge != "reduce_scatter":
        states = ranks.stack(as_bytes([out, lse]), timeout)
    else:
        by_heads = zip(out.split(heads, dim=2), lse.split(heads, dim=2), strict=True)
        sent = [as_bytes(list(part)) for part in by_heads]
        states = torch.stack(ranks.all_to_all(sent, [sent[0].numel()] * ranks.size, timeout))
    rows = (*out.shape[:2], heads)
    sizes = [num_bytes([((*rows, out.shape[3]), out.dtype)]), num_bytes([(rows, lse.dtype)])]
    outs, lses = states.split(sizes, dim=1)  # strided views; flash_attn_combine accepts them
    outs = outs.view(out.dtype).unflatten(1, (*rows, out.shape[3]))
    lses = lses.view(lse.dtype).unflatten(1, rows)
    return flash_attn_combine(outs, lses, out_dtype=dtype)
