"""What the ranks of the tests compute."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

import flashtile
from flashtile import masks, parallel
from flashtile.integrations.torch import Kernels
from flashtile.operators.attention import BACKWARD, FORWARD_INTO
from flashtile.parallel.ranks import Pending, Ranks
from flashtile.reference import attention as reference


def compare(
    group: Any,
    *,
    tokens: tuple[int, int] = (50, 50),
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    batch: int = 2,
    documents: tuple[list[int], list[int]] | None = None,
    sink: bool = False,
    layout: str = "zigzag",
    method: str = "auto",
    mesh: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float64,
    lazy: bool = False,
    pictures: tuple[list[int], list[tuple[int, int]], int] | None = None,
    **mask: Any,
) -> dict[str, float]:
    """Largest error of out, lse and every gradient of all ranks together, against one device.

    ``pictures`` are the arguments of :func:`with_pictures`, a mask function.
    """
    torch.manual_seed(0)
    batch = 1 if documents else batch
    of_keys = tokens[1], heads[1]
    shapes = [(tokens[0], heads[0], sizes[0]), (*of_keys, sizes[0]), (*of_keys, sizes[1])]
    whole = [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]
    dout = torch.randn(batch, tokens[0], heads[0], sizes[1], dtype=dtype)
    dlse = torch.randn(batch, heads[0], tokens[0], dtype=dtype)
    of_sink = [torch.randn(heads[0], dtype=dtype)] if sink else []
    dim, over = 1, group
    packed: dict[str, Any] = {}
    if documents:
        whole, dout, dlse, dim = [t[0] for t in whole], dout[0], dlse[0], 0
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(_offsets, documents), strict=True))
    where: dict[str, Any] = {"group": group}
    if mesh is not None:
        over = None
        where = {"mesh": _mesh(mesh)}
    cut = [parallel.shard(t, dim, over, layout, mesh=where.get("mesh")) for t in (*whole, dout)]
    part_dlse = parallel.shard(dlse, -1, over, layout, mesh=where.get("mesh"))
    own = [t.clone() for t in (*cut[:3], *of_sink)]
    if lazy:  # like z.conj().imag: memory holds the numbers before a negation
        *own, cut[3], part_dlse = (torch._neg_view(t.neg()) for t in (*own, cut[3], part_dlse))
    own = [t.requires_grad_() for t in own]
    by_mask, of_reference = {}, mask
    if pictures is not None:
        seen = with_pictures(*pictures)
        by_mask["block_mask"] = parallel.shard_mask(seen, tokens[0], group, layout, BLOCK_SIZE=16)
        places = torch.arange(tokens[0])
        of_reference = mask | {"mask": seen(0, 0, places[:, None], places)[None, None]}
    out, lse = parallel.context_parallel_attention(
        *own[:3], sink=own[3] if sink else None, layout=layout, method=method, return_lse=True, timeout=60,
        **where, **packed, **mask, **by_mask,
    )  # fmt: skip
    gradients = torch.autograd.grad([out, lse], own, [cut[3], part_dlse])

    leaves = [t.clone().requires_grad_() for t in (*whole, *of_sink)]
    if packed:
        packed |= {"max_seqlen_q": tokens[0], "max_seqlen_k": tokens[1]}
    if sink:
        of_reference = of_reference | {"sink": leaves[3]}
    exact = reference.attention(*leaves[:3], **packed, **of_reference)
    expected = [*exact, *torch.autograd.grad(exact, leaves, [dout, dlse])]
    if sink:
        total = gradients[3].clone()
        dist.all_reduce(total, group=group if mesh is None else None)
        gradients = (*gradients[:3], total)
    dims = [dim, -1, dim, dim, dim]
    errors = {}
    for name, got, right, along in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), expected, dims, strict=False
    ):
        part = parallel.shard(right, along, over, layout, mesh=where.get("mesh"))
        assert got.shape == part.shape, f"{name}: {tuple(got.shape)} instead of {tuple(part.shape)}"
        errors[name] = _error(got, part)
    if sink:
        errors["dsink"] = _error(gradients[3], expected[5])
    return errors


def with_pictures(documents: list[int], pictures: list[tuple[int, int]], window: int) -> masks.MaskMod:
    """The mask of Gemma 3: causal, but the tokens of a picture see each other, within documents and a window.

    Args:
        documents: lengths of the packed documents.
        pictures: (start, stop) of the tokens of each picture.
        window: number of tokens before its own that a token sees; -1: all.
    """
    document = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    picture = -1 - torch.arange(len(document))  # each token of text is one of its own
    for number, (start, stop) in enumerate(pictures):
        picture[start:stop] = number
    seen = masks.causal() | masks.document(picture)
    return masks.document(document) & seen & masks.window(window, -1)


def traffic(
    group: Any, *, tokens: int, heads: tuple[int, int], sizes: tuple[int, int], method: str, layout: str,
    documents: list[int] | None = None, pictures: Any = None, **mask: Any,
) -> dict[str, tuple[dict[int, int], list[str]]]:  # fmt: skip
    """What happens in each pass of a call in float32: bytes that this rank sends to each other one, and the
    order in which it posts messages, attends, and waits for messages."""
    torch.manual_seed(0)
    sent: Counter[int] = Counter()
    events: list[str] = []

    def post(ranks: Any, messages: Any, *others: Any) -> Any:
        for peer, buffer in messages:
            sent[peer] += buffer.numel()
        return plain(ranks, messages, *others)

    def told(of: Any, name: str, event: str) -> Any:
        function = getattr(of, name)

        def called(*given: Any, **named: Any) -> Any:
            events.append(event)
            return function(*given, **named)

        return mock.patch.object(of, name, called)

    head_dims = sizes[0], sizes[0], sizes[1]
    shapes = zip((heads[0], heads[1], heads[1]), head_dims, strict=True)
    whole = [torch.randn(1, tokens, *shape) for shape in shapes]
    offsets = {"cu_seqlens_q": _offsets(documents)} if documents else {}
    own = [parallel.shard(t, 1, group, layout)[0 if documents else slice(None)] for t in whole]
    own = [t.requires_grad_() for t in own]
    if pictures is not None:
        mask["block_mask"] = parallel.shard_mask(
            with_pictures(*pictures), tokens, group, layout, BLOCK_SIZE=16
        )
    plain, found = Ranks.post, {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Ranks, "post", post))
        for of, name, event in (
            (Ranks, "post", "post"), (FORWARD_INTO, "launch", "attend"), (BACKWARD, "launch", "attend"),
            (Pending, "wait", "wait"),
        ):  # fmt: skip
            stack.enter_context(told(of, name, event))
        out = parallel.context_parallel_attention(
            *own, group=group, method=method, layout=layout, timeout=60, **offsets, **mask
        )
        found["forward"] = {peer: count for peer, count in sent.items() if count}, [*events]
        sent.clear()
        events.clear()
        out.sum().backward()
        found["backward"] = {peer: count for peer, count in sent.items() if count}, [*events]
    return found


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _error(got: Tensor, right: Tensor) -> float:
    if not got.numel():
        return 0.0
    both = (got == right) | (got - right).abs().isfinite()
    return float("inf") if not both.all() else (got - right).nan_to_num(0.0).abs().max().item()


_meshes: dict[tuple[int, int], Any] = {}


def _mesh(shape: tuple[int, int]) -> Any:
    if shape not in _meshes:
        _meshes[shape] = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    return _meshes[shape]


def decode(group: Any, *, steps: int, pages: bool, merge: str, interleave: int, seqlen_q: int) -> list[float]:
    """Errors of steps of decoding over a cache that begins empty, against a whole one; of out, and of lse."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(1)
    batch, heads, heads_kv, width, capacity = 3, 4, 2, 16, 32
    whole = torch.zeros(2, batch, capacity, heads_kv, width, dtype=torch.float64)
    own = torch.zeros(2, batch, capacity, heads_kv, width, dtype=torch.float64)
    table = None
    if pages:  # pages of 4 tokens in an order of their own; what no sequence has holds NaN
        own = torch.full((2, batch * 8 + 1, 4, heads_kv, width), torch.nan, dtype=torch.float64)
        table = torch.randperm(batch * 8).view(batch, 8).to(torch.int32) + 1
    sink = torch.randn(heads, dtype=torch.float64)
    lengths = torch.tensor([0, 1, 5], dtype=torch.int32)
    prefix = torch.randn(2, batch, 5, heads_kv, width, dtype=torch.float64)
    whole[:, :, :5] = prefix
    for b in range(batch):
        for position in range(int(lengths[b])):
            if position // interleave % size == rank:
                index = position // (interleave * size) * interleave + position % interleave
                row, column = (b, index) if table is None else (int(table[b, index // 4]), index % 4)
                own[:, row, column] = prefix[:, b, position]
    part = slice(None)
    if merge == "reduce_scatter":
        part = slice(rank * heads // size, (rank + 1) * heads // size)
    errors = []
    for _ in range(steps):
        q = torch.randn(batch, seqlen_q, heads, width, dtype=torch.float64)
        k, v = torch.randn(2, batch, seqlen_q, heads_kv, width, dtype=torch.float64).unbind()
        arguments: dict[str, Any] = {"cache_seqlens": lengths, "sink": sink}
        out, lse = parallel.context_parallel_decode(
            q, *own, k, v, block_table=table, group=group, interleave=interleave, merge=merge,
            return_lse=True, timeout=60, **arguments,
        )  # fmt: skip
        right, right_lse = flashtile.flash_attn_with_kvcache(
            q, *whole, k, v, causal=True, return_softmax_lse=True, **arguments
        )
        errors += [_error(out, right[:, :, part]), _error(lse, right_lse[:, part])]
        lengths = lengths + seqlen_q
    none = parallel.context_parallel_decode(
        q[:0], *(own if table is not None else [x[:0] for x in own]), cache_seqlens=lengths[:0],
        block_table=None if table is None else table[:0], group=group, interleave=interleave, merge=merge,
    )  # fmt: skip
    assert none.shape == (0, *out.shape[1:])
    return errors


def through_layers(
    group: Any,
    *,
    layers: int,
    sizes: tuple[int, int, int] = (96, 2, 32),
    device: str = "cpu",
    method: str = "ring",
) -> tuple[float, float]:
    """Relative errors of many layers of attention in bfloat16: over ranks, and on one device. ``sizes`` are
    tokens, heads and head_dim."""
    torch.manual_seed(2)
    tokens, heads, width = sizes
    weights = torch.randn(layers, 3, heads * width, heads * width).to(device) / (heads * width) ** 0.5
    x = torch.randn(1, tokens, heads * width).to(device)

    def run(x: Tensor, dtype: torch.dtype, attend: Any) -> Tensor:
        x = x.to(dtype)
        for layer in weights.to(dtype):
            q, k, v = (torch.nn.functional.rms_norm(x, x.shape[-1:]) @ w for w in layer)
            x = x + attend(*(t.unflatten(-1, (heads, width)) for t in (q, k, v))).flatten(-2)
        return x

    def over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.context_parallel_attention(q, k, v, group=group, causal=True, method=method)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, causal=True)

    def exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=True)[0]

    exact = run(x, torch.float64, exactly)
    single = run(x, torch.bfloat16, alone)
    shared = parallel.unshard(run(parallel.shard(x, 1, group), torch.bfloat16, over_ranks), 1, group)
    return tuple(((t - exact).norm() / exact.norm()).item() for t in (shared, single))


def distributed(group: Any, *, shape: tuple[int, int], placements: tuple[int, int], public: bool) -> float:
    """Largest error of DTensors on a mesh of two dimensions; ``public``: of flashtile.attention."""
    torch.manual_seed(3)
    mesh = _mesh(shape)
    whole = [torch.randn(2, 12, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    placed = [distribute_tensor(t.detach(), mesh, [Shard(d) for d in placements]) for t in whole]
    placed = [t.requires_grad_() for t in placed]
    right, right_lse = flashtile.attention(*whole, causal=True, return_lse=True)
    if public:
        out = flashtile.attention(*placed, causal=True)
    else:
        out, lse = parallel.context_parallel_attention(
            *placed, causal=True, layout="contiguous", timeout=60, return_lse=True
        )
        assert out.placements == placed[0].placements
        assert _error(lse.full_tensor(), right_lse) < 1e-9
    dout = torch.randn_like(right)
    gradients = torch.autograd.grad(right, whole, dout)
    given = distribute_tensor(dout, mesh, [Shard(d) for d in placements])
    out.backward(given.redistribute(mesh, out.placements))
    found = [out, *(t.grad for t in placed)]
    return max(_error(a.full_tensor(), b) for a, b in zip(found, (right, *gradients), strict=True))


def through_torch(group: Any, *, of: str) -> list[float]:
    """Largest errors of torch's own parallelism on flashtile's kernels: "heads", "ring" or "fsdp"."""
    kernels = Kernels("CPU")
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        return {"heads": _heads_of_torch, "ring": _ring_of_torch, "fsdp": _fsdp_of_torch}[of](mesh)
    finally:
        kernels.remove()


def _small_call() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return q, k, v, the gradient of out, and [out, dq, dk, dv] of one causal call on one device."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 4, 16, 8)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [t.detach() for t in (q, k, v)], dout, [out, *torch.autograd.grad(out, (q, k, v), dout)]


def _heads_of_torch(mesh: Any) -> list[float]:
    tensors, dout, expected = _small_call()
    q, k, v = (distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in tensors)
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    got = [out, *torch.autograd.grad(out, (q, k, v), distribute_tensor(dout, mesh, [Shard(1)]))]
    return [_error(t.full_tensor(), right) for t, right in zip(got, expected, strict=True)]


def _ring_of_torch(mesh: Any) -> list[float]:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    tensors, dout, expected = _small_call()
    chunks, rank, size = torch.arange(16).chunk(2 * mesh.size()), mesh.get_local_rank(), mesh.size()
    own = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])  # its load balancing
    *qkv, dout = (t[:, :, own].contiguous() for t in (*tensors, dout))
    out, lse, *rest = ring._scaled_dot_product_ring_flash_attention(mesh, *qkv, 0.0, True)
    saved = out, lse, *rest[:4], 0.0, True, *rest[4:6]
    got = [out, *ring._scaled_dot_product_ring_flash_attention_backward(mesh, dout, *qkv, *saved)]
    return [_error(t, right[:, :, own]) for t, right in zip(got[:4], expected, strict=True)]


class _Packed(torch.nn.Module):
    """A layer of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = self.qkv(x).view(-1, 3, 4, 8).unbind(1)
        return self.out(varlen_attn(q, k, v, offsets, offsets, 9, 9).flatten(1))


def _fsdp_of_torch(mesh: Any) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    sharded, whole = _Packed(), _Packed()
    whole.load_state_dict(sharded.state_dict())
    fully_shard(sharded, mesh=mesh)
    offsets, batches = torch.tensor([0, 9, 14], dtype=torch.int32), torch.randn(mesh.size(), 14, 32)
    compiled = torch.compile(sharded, backend="aot_eager")
    compiled(batches[mesh.get_local_rank()], offsets).square().sum().backward()
    for batch in batches:
        (whole(batch, offsets).square().sum() / mesh.size()).backward()
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return [_error(ours.grad.full_tensor(), right.grad) for ours, right in pairs]


def compiled(group: Any, method: str = "ring") -> tuple[int, float]:
    """(graphs, largest error) of a compiled function that calls attention over ranks, with gradients."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = parallel.context_parallel_attention(q * 2, k, v, group=group, method=method, causal=True)
        return (out + 1).sin()

    torch.manual_seed(4)
    tensors = [torch.randn(2, 6, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    results = []
    torch._dynamo.reset()
    for run in (function, torch.compile(function, backend=counting)):
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    torch._dynamo.reset()
    return len(graphs), max(_error(a, b) for a, b in zip(*results, strict=True))


def of_first_head(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (head == 0)


def faulty(group: Any, *, timeout: float = 30, stays_away: bool = False, **arguments: Any) -> str:
    """What a rank hears of a call that cannot go well."""
    if stays_away:
        return "stayed away"
    tokens, heads = arguments.pop("tokens", 8), arguments.pop("heads", 2)
    dtype = arguments.pop("dtype", torch.float32)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    learns = arguments.pop("learns", False)
    x = torch.randn(1, tokens, heads, 16, dtype=dtype, device=device, requires_grad=learns)
    try:
        if "of_mask" in arguments:
            causal = masks.causal()
            arguments["block_mask"] = parallel.shard_mask(
                **{"mask_mod": causal, "seqlen": 16, "group": group, "timeout": timeout}
                | arguments.pop("of_mask")
            )
        k = x if arguments.pop("learns_keys", True) else x.detach()
        parallel.context_parallel_attention(x, k, k, group=group, timeout=timeout, **arguments)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dies_between_passes(group: Any, *, timeout: float, dies: bool) -> str:
    """What a rank hears in the backward pass when another has gone."""
    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    out = parallel.context_parallel_attention(x, x, x, group=group, timeout=timeout, method="ring")
    if dies:
        os._exit(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def on_gpus(
    group: Any, *, method: str, sizes: tuple[int, int], **mask: Any
) -> dict[str, tuple[float, float]]:
    """Root-mean-square errors in bfloat16 of this rank's out and gradients, and those of one GPU's."""
    torch.manual_seed(dist.get_world_size(group))
    tokens, width = sizes
    shapes = [(1, tokens, heads, width) for heads in (8, 2, 2, 8)]
    whole = [torch.randn(shape).cuda().bfloat16() for shape in shapes]
    dout = whole.pop()

    def both(attend: Any, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attend(*leaves, **mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def shared(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        return parallel.context_parallel_attention(q, k, v, group=group, method=method, **mask)

    def exactly(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        return reference.attention(q, k, v, **mask)[0]

    exact = both(exactly, [t.double() for t in whole], dout.double())
    alone = both(flashtile.attention, whole, dout)
    cut = [parallel.shard(t, 1, group) for t in (*whole, dout)]
    errors = {}
    for name, got, single, right in zip(
        ("out", "dq", "dk", "dv"), both(shared, cut[:3], cut[3]), alone, exact, strict=True
    ):
        parts = [parallel.shard(t, 1, group) for t in (single, right)]
        errors[name] = tuple((t - parts[1]).square().mean().sqrt().item() for t in (got, parts[0]))
    return errors


def decode_by_symmetric_memory(group: Any, *, batch: int, replays: int = 200) -> list[float]:
    """Differences from all-gather's results: of out and lse of calls of two sizes, and of replays of a graph
    with a query each, in which the ranks are late in turns and no host waits."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, batch, 512, 2, 128).cuda().bfloat16()[:, :, rank::size].contiguous()
    queries = torch.randn(replays, batch, 1, 8, 128).cuda().bfloat16()
    lengths = torch.randint(0, 513, (batch,), dtype=torch.int32).cuda()
    lengths[:2] = torch.tensor([0, 1])

    def call(q: Tensor, merge: str, **options: Any) -> Any:
        caches = k_cache[: len(q)], v_cache[: len(q)]
        return parallel.context_parallel_decode(
            q, *caches, cache_seqlens=lengths[: len(q)], group=group, merge=merge, **options
        )

    differences = []
    for q in (queries[0], queries[1, :-1], queries[2]):
        right, right_lse = call(q, "allgather", return_lse=True)
        out, lse = call(q, "symmetric", return_lse=True)
        differences.append((out.float() - right.float()).abs().max().item())
        differences.append((lse - right_lse).nan_to_num(0.0).abs().max().item())  # -inf - -inf
        assert torch.equal(lse.isinf(), right_lse.isinf())
        assert not lse.isnan().any()
    found = torch.full_like(queries, torch.nan)
    number = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        out = call(queries.index_select(0, number)[0], "symmetric")
        found.index_copy_(0, number, out.unsqueeze(0))
        number.add_(1).remainder_(replays)

    graph = _captured(step)
    number.zero_()
    for i in range(replays):
        if i % 4 == rank:
            torch.cuda._sleep(10**6)
        graph.replay()
    for q, out in zip(queries, found, strict=True):
        differences.append((out.float() - call(q, "allgather").float()).abs().max().item())
    return differences


def _captured(step: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def decode_in_a_graph(group: Any) -> list[float]:
    """Errors of a captured step of decoding over a sharded cache, for changing lengths, against one GPU."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    cache = torch.randn(2, 3, 4096, 2, 128).cuda().bfloat16()
    q = torch.randn(3, 1, 8, 128).cuda().bfloat16()
    own = cache[:, :, rank::size].contiguous()
    lengths = torch.tensor([0, 1, 4096], dtype=torch.int32).cuda()

    out = torch.empty_like(q)
    graph = _captured(
        lambda: out.copy_(parallel.context_parallel_decode(q, *own, cache_seqlens=lengths, group=group))
    )
    errors = []
    for change in ([0, 1, 4096], [5, 0, 77], [4095, 2048, 3]):
        lengths.copy_(torch.tensor(change, dtype=torch.int32))
        q.normal_()
        dist.broadcast(q, 0, group=group)
        graph.replay()
        right = flashtile.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths)
        errors.append((out.float() - right.float()).abs().max().item())
    return errors


def example(group: Any, *, path: str, steps: int, checkpoint: Any) -> list[float]:
    """Losses of the example of a long sequence, from its checkpoint on."""
    import script_runner

    script = script_runner.load(path)
    torch.manual_seed(0)
    model = script.Llama(script.sized(1, 2, 32))
    text = torch.arange(4000).remainder(61).add(32).to(torch.uint8)
    corpus = script.Corpus("numbers", 1, text, text)
    attend = script.partial(script.attention, method="ring", window=-1)
    return script.train(model, corpus, attend, 90, steps, 1e-2, 0, checkpoint, 2, group)


def pictures_example(group: Any) -> tuple[float, float]:
    """Differences of the example of text and pictures from one device: of losses and of gradients."""
    import script_runner

    script = script_runner.load("examples/train_pictures.py")
    torch.manual_seed(0)
    model = script.Model(32, 2, 2, 1)
    return script.compare(model, script.draw(300, 160, 40, torch.device("cpu"), 0), 70, group)


def rounding(group: Any, **mask: Any) -> dict[str, tuple[float, float, float]]:
    """In bfloat16: root-mean-square error of all ranks' out and gradients, of float64's rounded once, and of
    one device."""
    torch.manual_seed(4)
    whole = [torch.randn(1, 256, 2, 32).bfloat16() for _ in range(4)]
    leaves = [t.double().requires_grad_() for t in whole[:3]]
    right = flashtile.attention(*leaves, **mask)
    expected = [right.detach(), *torch.autograd.grad(right, leaves, whole[3].double())]
    own = [parallel.shard(t, 1, group, "contiguous").requires_grad_() for t in whole]
    out = parallel.context_parallel_attention(
        *own[:3], group=group, method="ring", layout="contiguous", **mask
    )
    found = [out, *torch.autograd.grad(out, own[:3], own[3])]
    leaves = [t.requires_grad_() for t in whole[:3]]
    alone = flashtile.attention(*leaves, **mask)
    single = [alone.detach(), *torch.autograd.grad(alone, leaves, whole[3])]
    errors = {}
    for name, part, exact, one in zip(("out", "dq", "dk", "dv"), found, expected, single, strict=True):
        got = parallel.unshard(part.detach(), 1, group, layout="contiguous")
        both = (got - exact, exact.bfloat16() - exact, one - exact)
        errors[name] = tuple(error.square().mean().sqrt().item() for error in both)
    return errors
