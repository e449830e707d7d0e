"""Context parallelism over several processes as one differentiable function, for :func:`fuzz.prelude.agree`."""

from __future__ import annotations

import functools
import io
from typing import Any

import torch

import ranks_pool

MOST = 4


@functools.cache
def _pool() -> ranks_pool.Pool:
    return ranks_pool.Pool(MOST, groups=tuple(range(1, MOST)))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _run(size: int, task: Any, *given: Any) -> list[Any]:
    answers = _pool().run(task, size, data=_pack(given))
    for answer in answers:
        if not isinstance(answer, bytes):
            raise answer if isinstance(answer, Exception) else AssertionError("a rank has died")
    return [_unpack(answer) for answer in answers]


def attend_task(group: Any, data: bytes) -> bytes:
    """Run attention on a rank and return its token positions with its parts of out and lse, as bytes.

    With ``upstream``, the gradients of out and lse, it returns its parts of the tensors' gradients instead.
    """
    from flashtile import parallel

    tensors, upstream, options, layout, method = _unpack(data)
    dim = 0 if "cu_seqlens_q" in options else 1
    q, k, v, *sink = tensors
    at = [parallel.shard(torch.arange(t.shape[dim]), 0, group, layout) for t in (q, k)]
    own = [parallel.shard(t, dim, group, layout).requires_grad_() for t in (q, k, v)]
    own += [t.clone().requires_grad_() for t in sink]
    seen = options.pop("mask", None)
    if seen is not None:
        # One more row and column, because a mask function may not read a tensor without elements.
        seen = torch.nn.functional.pad(seen[0, 0], (0, 1, 0, 1))
        options["block_mask"] = parallel.shard_mask(
            lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx], q.shape[1], group, layout, BLOCK_SIZE=16
        )
    out, lse = parallel.context_parallel_attention(
        *own[:3], group=group, layout=layout, method=method, return_lse=True, timeout=60,
        **options, **({"sink": own[3]} if sink else {}),
    )  # fmt: skip
    if upstream is None:
        return _pack((at, out.detach(), lse.detach()))
    parts = [upstream[0].index_select(dim, at[0]), upstream[1].index_select(-1, at[0])]
    return _pack((at, torch.autograd.grad([out, lse], own, parts)))


def on_ranks(size: int, layout: str, method: str) -> Any:
    """Return ``context_parallel_attention`` on ``size`` ranks, as a function of whole tensors."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, options, *tensors):
            ctx.options, ctx.dim = options, 0 if "cu_seqlens_q" in options else 1
            ctx.save_for_backward(*tensors)
            found = _run(size, attend_task, [t.detach() for t in tensors], None, options, layout, method)
            order = torch.cat([at[0] for at, *_ in found]).argsort()
            out = torch.cat([out for _, out, _ in found], ctx.dim).index_select(ctx.dim, order)
            return out, torch.cat([lse for *_, lse in found], -1).index_select(-1, order)

        @staticmethod
        def backward(ctx, *upstream):
            tensors = [t.detach() for t in ctx.saved_tensors]
            found = _run(size, attend_task, tensors, upstream, ctx.options, layout, method)
            gradients = []
            for n in range(len(tensors)):
                parts = [grads[n] for _, grads in found]
                if n == 3:  # the sink's gradient is the sum over the ranks
                    gradients.append(sum(parts))
                else:
                    order = torch.cat([at[min(n, 1)] for at, _ in found]).argsort()
                    gradients.append(torch.cat(parts, ctx.dim).index_select(ctx.dim, order))
            return None, *gradients

    def attend(q, k, v, sink=None, return_lse=True, max_seqlen_q=None, max_seqlen_k=None, **options):
        return Attend.apply(options, q, k, v, *(() if sink is None else (sink,)))

    return attend


def decode_task(group: Any, data: bytes) -> bytes:
    import torch.distributed as dist

    from flashtile import parallel

    q, k_cache, v_cache, interleave, merge, options = _unpack(data)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    positions = torch.arange(k_cache.shape[1])
    own = positions[positions // interleave % size == rank]
    lengths = options["cache_seqlens"]
    expected = [(own < n).sum().item() for n in lengths.tolist()]
    if parallel.own_tokens(lengths, rank, size, interleave).tolist() != expected:
        raise AssertionError(f"own_tokens differs from {expected}")
    room = torch.nn.functional.pad
    parts = [room(t.index_select(1, own), (0, 0, 0, 0, 0, 1)).contiguous() for t in (k_cache, v_cache)]
    out, lse = parallel.context_parallel_decode(
        q, *parts, group=group, interleave=interleave, merge=merge, return_lse=True, timeout=60, **options
    )
    return _pack((out, lse))


def decode_on_ranks(size: int, interleave: int, merge: str) -> Any:
    def attend(q, k_cache, v_cache, **options):
        options.pop("return_softmax_lse")
        found = _run(size, decode_task, q, k_cache, v_cache, interleave, merge, options)
        if merge == "reduce_scatter":
            return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 1)
        return found[-1]

    return attend
