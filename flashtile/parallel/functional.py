"""``context_parallel_attention``: attention over a sequence distributed over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtile.api.attention import attention
from flashtile.checks.arguments import ERRORS, check_choice, check_dense, named
from flashtile.checks.attention import check_call
from flashtile.checks.conversions import (
    as_masking,
    as_operands,
    as_seconds,
    check_flag,
    in_memory,
    make_options,
)
from flashtile.op.operation import PLAIN_TYPES, any_learns
from flashtile.op.registry import flat, flat_fields
from flashtile.parallel.attend import Method, Shards
from flashtile.parallel.blocks import Mask
from flashtile.parallel.gather import AllGather
from flashtile.parallel.layout import LAYOUTS, all_pieces
from flashtile.parallel.masked import ShardedMask, gather_under_mask
from flashtile.parallel.model import METHODS, Sharing, choose, setting_of
from flashtile.parallel.ranks import TIMEOUT, Alone, Ranks, check_mesh, ranks_of
from flashtile.parallel.ring import ring_of
from flashtile.parallel.ulysses import Ulysses, in_order, keys_shared
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors, Options
from flashtile.problems.masking import Masking
from flashtile.torch_private import never_compiled

SEQUENCE, HEADS = 1, 2
"""Dimensions of DTensors (batch, seqlen, heads, head_dim)."""


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    method: str = "auto",
    layout: str = "zigzag",
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    timeout: float = TIMEOUT,
    backend: str | None = None,
    block_mask: ShardedMask | None = None,
) -> Tensor | Any:
    """Compute :func:`flashtile.attention` of a sequence whose tokens are distributed over ranks.

    The result is differentiable. All ranks of the group call this together, each with its own tokens of q, k
    and v, as :func:`flashtile.parallel.shard` cuts them. Partial results of a row are float32 until they are
    merged by their log-sum-exp. Gradients of keys and values are summed over ranks in float32, in a
    fixed order. Where few keys travel, as under a short window, a rank's own part is rounded before it is
    summed. For float64 inputs, these partial results and gradients are float64.

    Args:
        q: (batch, tokens of this rank, heads_q, head_dim), or (tokens, heads_q, head_dim) with
            ``cu_seqlens_q``. Ranks may have different numbers of tokens, and some may have none.
        k, v: as q, with heads_kv heads; the head_dim of v may differ. q, k and v may also be DTensors
            (batch, seqlen, heads, head_dim) with equal placements. The group is then the dimension of their
            mesh that shards the sequence; other dimensions may shard batch or heads. ``layout`` must be
            "contiguous" for DTensors.
        group: the process group that shares the sequence; None is the default one.
        mesh: a DeviceMesh instead of ``group``, with dimensions (ranks,) or (ring, ulysses). Ranks along the
            dimension ulysses exchange tokens for heads. They should have the faster link.
        method: how ranks exchange data.

            * "ring": keys and values travel around the ranks.
            * "ulysses": tokens are exchanged for heads, then each rank attends to the whole sequence.
            * "allgather": each rank gathers the keys and values that its queries see.
            * "auto": the fastest method by the IO model (:func:`flashtile.parallel.explain`). On a mesh
              (ring, ulysses) it is always Ulysses within a ring.
        layout: which tokens a rank has, "zigzag", "contiguous" or "striped". Under a causal mask, zigzag and
            striped give all ranks the same work. Zigzag and striped tensors must be cut as ``shard`` does.
        cu_seqlens_q, cu_seqlens_k: offsets of documents packed in the *whole* sequence, from 0 to its number
            of tokens, the same on all ranks. cu_seqlens_k defaults to cu_seqlens_q. They are read on the
            host, so a list or a CPU tensor saves a synchronisation.
        softmax_scale, causal, window_size, softcap, backend: as for :func:`flashtile.attention`. Masks are
            aligned to the bottom right of the whole sequence.
        sink: (heads_q,), the same on all ranks, or None. Its gradient covers only this rank's queries: sum it
            over the group, as you do for all replicated parameters.
        deterministic: as for :func:`flashtile.attention`. Sums over ranks always have the same order.
        return_lse: also return the log-sum-exp of this rank's rows.
        timeout: seconds to wait for the other ranks; 600 by default.
        block_mask: this rank's part of a mask function, from :func:`shard_mask`, or None. It alone decides
            which keys a query sees, so ``causal``, ``window_size`` and ``cu_seqlens_q`` must be left out.
            The method is all-gather. Gradients of keys are rounded to their dtype before they are added in
            float32.

    Returns:
        out of this rank's rows, in the shape of q with the head_dim of v. With ``return_lse``, (out, lse)
        with lse (batch, heads_q, tokens), or (heads_q, tokens) with ``cu_seqlens_q``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`. ValueError is also raised,
            on all ranks, if they disagree on a shape, the mask or the method.
        RuntimeError: a rank has ended or has not made this call within ``timeout``.

    With gloo, the ranks compare their arguments at every call, and every wait ends after ``timeout``. With
    NCCL, they do not compare arguments again that were equal in an earlier call, unless FLASHTILE_DEBUG=1.
    Waits on the GPU end after the group's own timeout.

    The call breaks the graph of ``torch.compile``, because ranks exchange their arguments on the host before
    they compute. With ``fullgraph=True`` the compiler raises an error that says so.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 2, 100, 4, 32).unbind()  # the same on all ranks, for the example
        >>> parts = [flashtile.parallel.shard(t, 1) for t in (q, k, v)]
        >>> out = flashtile.parallel.context_parallel_attention(*parts, causal=True)
        >>> torch.testing.assert_close(
        ...     flashtile.parallel.unshard(out, 1), flashtile.attention(q, k, v, causal=True)
        ... )
        >>> dist.destroy_process_group()
    """
    if torch.compiler.is_dynamo_compiling():
        return _call_in_eager_mode(
            q, k, v, group=group, mesh=mesh, method=method, layout=layout, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            softcap=softcap, sink=sink, deterministic=deterministic, return_lse=return_lse, timeout=timeout,
            backend=backend, block_mask=block_mask,
        )  # fmt: skip
    check_flag("return_lse", return_lse)
    options = make_options(
        as_masking(causal, window_size),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
    )
    check_choice("layout", layout, LAYOUTS)
    check_choice("method", method, METHODS)
    timeout = as_seconds("timeout", timeout)
    if block_mask is not None:
        _check_with_mask(block_mask, q, layout, method, mesh, options, cu_seqlens_q)
    if type(q) not in PLAIN_TYPES and _is_distributed(q):
        return _attend_distributed(
            q, k, v, return_lse, layout, group, mesh, cu_seqlens_q, sink, method=method,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            deterministic=deterministic, timeout=timeout, backend=backend,
        )  # fmt: skip
    offsets_q, offsets_k = _offsets(cu_seqlens_q, cu_seqlens_k)
    packed = offsets_q is not None
    ranks = _find_ranks(group, mesh, method)
    q, k, v, sink = (in_memory(t) for t in (*as_operands(q, k, v), sink))
    if packed:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_dense(name, tensor)
            if tensor.dim() != 3:
                raise ValueError(
                    f"{name} must have 3 dimensions (tokens, heads, head_dim) with cu_seqlens_q, "
                    f"got shape {tuple(tensor.shape)}"
                )
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    call = _agree(
        ranks, q, k, v, sink, options, method, layout, mesh, offsets_q, offsets_k, block_mask, timeout
    )
    if block_mask is not None:
        keys, values = gather_under_mask(k, v, block_mask, ranks, timeout)
        return attention(
            q, keys, values, block_mask=block_mask.block_mask, softmax_scale=softmax_scale, softcap=softcap,
            sink=sink, deterministic=deterministic, return_lse=return_lse, backend=backend,
        )  # fmt: skip
    out, lse = _Attention.apply(q, k, v, sink, _method(call, ranks, mesh, method, layout, options, timeout))
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


@never_compiled("the ranks of context_parallel_attention compare their calls on the host")
def _call_in_eager_mode(*arguments: Any, **named: Any) -> Any:
    return torch.compiler.disable(context_parallel_attention)(*arguments, **named)


def _is_distributed(q: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(q, DTensor)


def _attend_distributed(
    q: Any, k: Any, v: Any, return_lse: bool, layout: str, group: Any, mesh: Any, cu_seqlens: Any, sink: Any,
    **options: Any,
) -> Any:  # fmt: skip
    """Compute attention of DTensors (batch, seqlen, heads, head_dim) from their local tensors.

    Exactly one dimension of the mesh must shard the sequence. Ranks along this dimension exchange keys and
    values. The other dimensions may replicate the tensors, or shard batch or heads, without communication.
    """
    from torch.distributed.tensor import Shard

    given = {"group": group, "mesh": mesh, "cu_seqlens_q": cu_seqlens, "sink": sink}
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None for DTensors, got {type(value).__name__}")
    dim_of_sequence = _check_placements(q, k, v, layout)
    out, lse = context_parallel_attention(
        *(t.to_local() for t in (q, k, v)), group=q.device_mesh.get_group(dim_of_sequence), layout=layout,
        return_lse=True, **options,
    )  # fmt: skip
    placed = _placed(out, q, (*q.shape[:3], v.shape[3]), q.placements)
    if not return_lse:
        return placed
    of_lse = [Shard({0: 0, SEQUENCE: 2, HEADS: 1}[p.dim]) if p.is_shard() else p for p in q.placements]
    return placed, _placed(lse, q, (q.shape[0], q.shape[2], q.shape[1]), of_lse)


def _check_placements(q: Any, k: Any, v: Any, layout: str) -> int:
    """Check the placements of DTensors, and return the dimension of the mesh that shards the sequence."""
    from torch.distributed.tensor import DTensor

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor if q is one, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise NotImplementedError(
                f"{name} must be (batch, seqlen, heads, head_dim) as a DTensor, got {tuple(tensor.shape)}"
            )
        if tensor.device_mesh != q.device_mesh or tensor.placements != q.placements:
            raise ValueError(
                f"{name} must be placed as q, {q.placements} on {q.device_mesh}, got {tensor.placements} on "
                f"{tensor.device_mesh}: redistribute it"
            )
    over = []
    for dim, placement in enumerate(q.placements):
        if placement.is_partial() or (placement.is_shard() and placement.dim not in (0, SEQUENCE, HEADS)):
            raise ValueError(f"q must be sharded by batch, sequence or heads, or replicated, got {placement}")
        if placement.is_shard(SEQUENCE):
            over.append(dim)
    if len(over) != 1:
        raise NotImplementedError(
            f"q must have its sequence sharded on one dimension of its mesh, got {q.placements}: "
            "flashtile.attention takes DTensors sharded only by batch or heads"
        )
    if layout != "contiguous":
        raise ValueError(
            f"layout must be 'contiguous' for DTensors, whose shards are consecutive, got {layout!r}"
        )
    for dim, placement in enumerate(q.placements):
        parts = q.device_mesh.size(dim)
        if placement.is_shard(HEADS) and (q.shape[HEADS] % parts or k.shape[HEADS] % parts):
            raise ValueError(f"k must have heads for {parts} equal shards, got {k.shape[HEADS]}")
    return over[0]


def _placed(local: Tensor, like: Any, shape: tuple[int, ...], placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


class _Call(NamedTuple):
    """Properties of a call that all ranks agreed on."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    offsets_q: tuple[int, ...] | None
    offsets_k: tuple[int, ...] | None
    backward: bool


class _Attention(torch.autograd.Function):
    """Autograd function of a method's forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, method: Method):
        result = method.forward(q, k, v, sink)
        ctx.method, ctx.has_sink = method, sink is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*result.saved, *(() if sink is None else (sink,)))
        ctx.out_shape, ctx.out_dtype, ctx.out_device = result.out.shape, result.out.dtype, result.out.device
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):
        # A rank whose results were not used must still exchange messages with the others.
        saved = ctx.saved_tensors
        sink = saved[-1] if ctx.has_sink else None
        if dout is None:
            dout = torch.zeros(ctx.out_shape, dtype=ctx.out_dtype, device=ctx.out_device)
        saved = saved[:-1] if ctx.has_sink else saved
        result = ctx.method.backward(in_memory(dout), in_memory(dlse), saved, sink)
        return *result, None


def _check_with_mask(
    mask: Any, q: Any, layout: str, method: str, mesh: Any, options: Options, offsets: Any
) -> None:
    """Raise for an argument that cannot be combined with ``block_mask``."""
    if not isinstance(mask, ShardedMask):
        raise TypeError(f"block_mask must be made by flashtile.parallel.shard_mask, got {named(mask)}")
    if layout != mask.layout:
        raise ValueError(f"layout must be that of block_mask, {mask.layout!r}, got {layout!r}")
    if method not in ("auto", "allgather"):
        raise NotImplementedError(f"method must be 'auto' or 'allgather' with block_mask, got {method!r}")
    for name, given, instead in (
        ("causal or window_size", options.masking != Masking(), ": write it in mask_mod"),
        ("cu_seqlens_q", offsets is not None, ": write documents in mask_mod"),
        ("a mesh of two dimensions", getattr(mesh, "ndim", 1) > 1, ""),
        ("q, a DTensor,", _is_distributed(q), ": pass its local tensor"),
    ):
        if given:
            raise NotImplementedError(f"{name} cannot be combined with block_mask{instead}")


def _agree(
    ranks: Ranks, q: Any, k: Any, v: Any, sink: Any, options: Options, method: str, layout: str, mesh: Any,
    offsets_q: Any, offsets_k: Any, mask: Any, timeout: float,
) -> _Call:  # fmt: skip
    """Check this rank's arguments, and compare its call with those of the other ranks.

    An error of this rank's arguments is sent to the other ranks before it is raised.
    """
    try:
        check_call(q, k, v, NO_EXTRAS if sink is None else OptionalTensors(sink=sink), options)
        if mask is not None:
            mask.check_tokens(ranks, q, k)
    except ERRORS as error:
        ranks.refuse(error, timeout, q.device if isinstance(q, Tensor) else torch.device("cpu"))
        raise
    learns = torch.is_grad_enabled() and any_learns((q, k, v, sink))
    same: dict[str, Any] = {
        "method": method,
        "layout": layout,
        "the GPU and its link": [of.name for of in setting_of(q.device, ranks.size)],
        "the mesh's shape": None if mesh is None else tuple(mesh.shape),
        "the batch size": q.shape[0],
        "heads of q": q.shape[2],
        "heads of k": k.shape[2],
        "head_dim": q.shape[3],
        "head_dim of v": v.shape[3],
        "dtype": str(q.dtype),
        "cu_seqlens_q": offsets_q,
        "cu_seqlens_k": offsets_k,
        "sink": sink is not None,
        # All ranks have the ranges of all. Their hash changes if the mask of any rank sees other blocks.
        "block_mask": None if mask is None else (mask.total, hash(mask.ranges)),
        "whether gradients are wanted": learns,
        # Under a mask, keys that need no gradient send none.
        "whether gradients of k or v are wanted": mask is not None and learns and any_learns((k, v)),
        "causal": options.masking.window_right == 0,  # named before the window that it becomes
        **{
            name: value
            for name, value in zip(flat_fields(Options), flat(options), strict=True)
            if name not in ("backend", "partial")
        },
    }
    own = {"tokens of q": q.shape[1], "tokens of k": k.shape[1]}
    result = ranks.agree(same, own, timeout, q.device)
    return _Call(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, q.device,
        result["tokens of q"], result["tokens of k"], offsets_q, offsets_k, learns,
    )  # fmt: skip


def _method(
    call: _Call, ranks: Ranks, mesh: Any, method: str, layout: str, options: Options, timeout: float
) -> Method:
    pieces_q = all_pieces(layout, call.lengths_q, "q")
    pieces_k = all_pieces(layout, call.lengths_k, "k")
    mask = _mask(call, options)
    if options.softmax_scale is None:
        options = options._replace(softmax_scale=call.head_dim**-0.5)
    two_dimensions = mesh is not None and mesh.ndim == 2
    if method == "auto" and not two_dimensions:
        sharing = Sharing(
            call.batch, sum(call.lengths_q), call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v,
            str(call.dtype).removeprefix("torch."), mask.left, mask.right, layout, call.backward,
        )  # fmt: skip
        method = choose(sharing, ranks.size, *setting_of(call.device, ranks.size)).method
    if method in ("ring", "allgather"):
        shards = Shards(ranks, pieces_q, pieces_k, mask, options, timeout)
        return ring_of(shards) if method == "ring" else AllGather(shards)
    # Ulysses within each group of ranks, and a ring over the groups. Without a mesh there is one group.
    ring, inner = (ranks_of(mesh.get_group(dim)) for dim in (0, 1)) if two_dimensions else (Alone(), ranks)
    groups = [slice(i * inner.size, (i + 1) * inner.size) for i in range(ring.size)]
    groups_q, groups_k = (
        tuple(in_order([piece for pieces in of_ranks[group] for piece in pieces]) for group in groups)
        for of_ranks in (pieces_q, pieces_k)
    )
    shared = keys_shared(call.heads_q, call.heads_kv, inner.size)
    outer = ring_of(Shards(ring, groups_q, groups_k, mask, options, timeout, shared))
    own = groups[ring.rank]
    shards = Shards(inner, pieces_q[own], pieces_k[own], mask, options, timeout)
    return Ulysses(outer, shards, call.heads_q, call.heads_kv)


def _mask(call: _Call, options: Options) -> Mask:
    total_q, total_k = sum(call.lengths_q), sum(call.lengths_k)
    starts_q = (0, total_q) if call.offsets_q is None else call.offsets_q
    starts_k = (0, total_k) if call.offsets_k is None else call.offsets_k
    for name, starts, total in (("cu_seqlens_q", starts_q, total_q), ("cu_seqlens_k", starts_k, total_k)):
        if starts[-1] != total:
            raise ValueError(f"{name} must end at the {total} tokens of all ranks together, got {starts[-1]}")
    return Mask(options.masking.window_left, options.masking.window_right, starts_q, starts_k)


def _offsets(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_q must be given together with cu_seqlens_k, got None")
        return None, None
    of_q = _read_offsets("cu_seqlens_q", cu_seqlens_q)
    of_k = of_q if cu_seqlens_k is None else _read_offsets("cu_seqlens_k", cu_seqlens_k)
    if len(of_k) != len(of_q):
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q, {len(of_q)}, got {len(of_k)}"
        )
    return of_q, of_k


def _read_offsets(name: str, offsets: Any) -> tuple[int, ...]:
    values = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    if not isinstance(values, Sequence) or not all(type(value) is int for value in values):
        raise TypeError(f"{name} must be a tensor or a list of ints, got {type(offsets).__name__}")
    if len(values) < 2 or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ValueError(
            f"{name} must start at 0, not decrease, and have at least 2 entries, got {list(values)[:8]}"
        )
    return tuple(values)


def _find_ranks(group: Any, mesh: Any, method: str) -> Ranks:
    if mesh is None:
        return ranks_of(group)
    check_mesh(group, mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must have dimensions (ranks,) or (ring, ulysses), got {mesh.ndim} dimensions")
    if mesh.ndim == 2 and method != "auto":
        raise ValueError(
            f"method must be 'auto' on a mesh of two dimensions (Ulysses within a ring), got {method!r}"
        )
    return ranks_of(group, mesh)
