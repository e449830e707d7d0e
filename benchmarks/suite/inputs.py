"""The data of a workload: random q, k, v and dout, packed sequences, or a KV cache with its block tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from benchmarks.suite import mods
from benchmarks.suite.workload import Workload
from flashtile.problems.decode import FP8, CacheTensors
from flashtile.reference import decode as reference
from flashtile.testing import cu_seqlens, random_tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors of a workload: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.

    In decoding, k and v are KV caches. A paged cache has room for several copies of the call's keys and
    values, each with its own block table in ``block_tables``. A dense cache has one copy and no block table.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    cache_seqlens: Tensor | None = None
    block_tables: tuple[Tensor, ...] = ()
    descales: dict[str, Tensor] = field(default_factory=dict)
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    qv: Tensor | None = None
    """Queries for the columns that absorbed MLA shares with v; k does not contain these columns."""
    tangents: tuple[Tensor, ...] = ()
    """Tangents of q, k and v in forward mode."""

    def rows_of(self, tensor: Tensor, b: int) -> Tensor:
        """Return the rows of sequence b, (seqlen_q, heads, head_dim), of q, out or their gradients."""
        return _sequence(tensor, self.cu_seqlens_q, b)

    def keys_of(self, tensor: Tensor, b: int) -> Tensor:
        """Return the rows of sequence b, (seqlen_k, heads_kv, head_dim), of k, v or their gradients."""
        if self.cache_seqlens is None:
            return _sequence(tensor, self.cu_seqlens_k, b)
        table = self.block_tables[0] if self.block_tables else None
        descale = self.descales.get("k_descale" if tensor is self.k else "v_descale")
        tensors = CacheTensors(self.cache_seqlens, block_table=table)
        return reference.sequence(tensor, b, int(self.cache_seqlens[b]), tensors, descale, self.q.dtype)


def make_inputs(workload: Workload, device: torch.device | str) -> Inputs:
    """Return the workload's inputs: contiguous, standard normal q, k, v and dout.

    In decoding, k and v are KV caches whose pages are in random order.
    """
    tokens = [sum(pair[side] for pair in workload.sequences) for side in (0, 1)]

    def normal(side: int, number: int) -> Tensor:
        heads = (workload.num_heads_q, workload.num_heads_kv)[side]
        rows = (tokens[side],) if workload.varlen else (workload.batch, tokens[side] // workload.batch)
        width = workload.own_columns if number in (0, 1) else workload.width_v
        shape = (*rows, heads, width)
        return random_tensor(shape, workload.source_dtype, device, seed=number)

    q, dout = normal(0, 0), normal(0, 3)
    if workload.cache is not None:
        inputs = _with_cache(workload, q, dout)
        if workload.varlen:
            lengths = [seqlen_q for seqlen_q, _ in workload.sequences]
            inputs = replace(inputs, cu_seqlens_q=cu_seqlens(lengths, device))
        return replace(inputs, qv=normal(0, 6)) if workload.latent else inputs
    heads = workload.num_heads_q
    inputs = Inputs(
        q, normal(1, 1), normal(1, 2), dout,
        alibi_slopes=mods.alibi_slopes(heads, device) if workload.alibi else None,
        sink=random_tensor((heads,), torch.float32, device, seed=5) if workload.sink else None,
    )  # fmt: skip
    if workload.tangents:
        of_tensors = (inputs.q, inputs.k, inputs.v)
        moving = (random_tensor(t.shape, t.dtype, device, seed=7 + i) for i, t in enumerate(of_tensors))
        inputs = replace(inputs, tangents=tuple(moving))
    if not workload.varlen:
        return inputs
    offsets_q, offsets_k = (cu_seqlens(lengths, device) for lengths in zip(*workload.sequences, strict=True))
    return replace(inputs, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k)


def residual(attend: Callable[..., Tensor], tensors: Iterable[Tensor], tangents: Iterable[Tensor]) -> Tensor:
    """Return out minus its tangent, which gets no gradient, as the losses of MeanFlow have them."""
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, tensors, tangents)
        out, tangent = forward_ad.unpack_dual(attend(*duals))
    return out - tangent.detach()


def _with_cache(workload: Workload, q: Tensor, dout: Tensor) -> Inputs:
    """Return the inputs of decoding with random KV caches.

    On a GPU, a paged cache has ``workload.copies`` copies of the keys and values, each with its own block
    table. On the CPU it has one.
    """
    assert workload.cache is not None
    device, prefix = q.device, workload.cache.prefix
    generator = torch.Generator(device=device).manual_seed(0)
    contexts = [seqlen_k for _, seqlen_k in workload.sequences]
    page_size = workload.cache.page_size or max(contexts)
    own = [-(-(context - prefix) // page_size) for context in contexts]
    shared = prefix // page_size
    copies = 0
    if workload.cache.page_size:
        copies = workload.copies if device.type == "cuda" else 1
    per_copy = sum(own) + shared
    blocks = per_copy * copies or len(contexts)

    def cache(columns: int) -> Tensor:
        shape = (blocks, page_size, workload.num_heads_kv, columns)
        filled = torch.empty(shape, dtype=workload.cache_dtype, device=device)
        for part in filled.split(max(1, 2**27 // filled[0].numel())):
            part.copy_(torch.randn(part.shape, generator=generator, dtype=q.dtype, device=device))
        return filled

    order = torch.randperm(blocks, generator=generator, device=device).int()
    tables = []
    for mine in order.split(per_copy)[:copies]:
        table = torch.zeros((len(contexts), -(-max(contexts) // page_size)), dtype=torch.int32, device=device)
        table[:, :shared] = mine[:shared]
        for row, pages in zip(table, mine[shared:].split(own), strict=True):
            row[shared : shared + len(pages)] = pages
        tables.append(table)
    ones = torch.ones(workload.num_heads_kv, device=device)
    return Inputs(
        q, cache(workload.own_columns), cache(workload.width_v), dout,
        cache_seqlens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tuple(tables),
        descales={"k_descale": ones, "v_descale": ones} if workload.cache_dtype == FP8 else {},
    )  # fmt: skip


def _sequence(tensor: Tensor, offsets: Tensor | None, b: int) -> Tensor:
    return tensor[b] if offsets is None else tensor[int(offsets[b]) : int(offsets[b + 1])]
