"""Small calls of flash_attn_with_kvcache, each with the features in its name, on poisoned caches.

Memory of the cache that belongs to no sequence is NaN, and unused entries of the block table are out of
range. A kernel that reads either one gives a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from cases import FP32
from flashtile.problems.decode import FP8

NOBODY = 2**30
"""Entry of a block table beyond a sequence's length."""


@dataclass(frozen=True)
class DecodeCase:
    """A call: shapes, layout of the cache, and further arguments of flash_attn_with_kvcache."""

    name: str
    lengths: tuple[int, ...] | None = (17, 1, 40)  # in the cache beforehand; None: all of the capacity
    seqlen_q: int | tuple[int, ...] = 1  # a tuple: varlen
    new: int | tuple[int, ...] | None = None  # appended tokens; a tuple: varlen
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    head_dim_v: int | None = None
    page_size: int | None = None  # None: a dense cache
    capacity: int = 48
    cache_dtype: torch.dtype | None = None
    descale: str | None = None  # "head", "block" or "sequence"
    rotary_dim: int | None = None
    leftpad: tuple[int, ...] | None = None
    batch_idx: tuple[int, ...] | None = None
    rotary_seqlens: tuple[int, ...] | None = None
    alibi: str | None = None  # "head" or "batch"
    sink: str | None = None  # "float32", or "own" for the dtype of q
    tree: str | None = None  # "shared" or "batch"
    transposed: bool = False  # heads before tokens in memory
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)


def case(name: str, **features: Any) -> DecodeCase:
    """Return a case with features by name; other names are arguments of the call."""
    known = {n: features.pop(n) for n in list(features) if n in DecodeCase.__dataclass_fields__}
    return DecodeCase(name, arguments=features, **known)


CASES = (
    case("dense"),
    case("dense-full-capacity", lengths=None),
    case("dense-transposed", transposed=True),
    case("empty-cache", lengths=(0, 0, 5)),
    case("one-head", heads=(1, 1)),
    case("group-of-7", heads=(7, 1)),
    case("heads-in-blocks", heads=(18, 9), page_size=4),
    case("odd-head-dims", head_dim=17, head_dim_v=5),
    case("wide-values", head_dim=8, head_dim_v=40),
    case("paged", page_size=4),
    case("page-size-1", page_size=1, capacity=41),
    case("page-size-5-transposed", page_size=5, capacity=50, transposed=True),
    case("one-large-page", page_size=48),
    case("causal", seqlen_q=5, causal=True, page_size=4),
    case("causal-longer-than-keys", seqlen_q=5, causal=True, lengths=(3, 0, 20)),
    case("window-left", seqlen_q=3, window_size=(6, -1), page_size=4),
    case("window-both", seqlen_q=3, window_size=(4, 1)),
    case("window-causal", seqlen_q=4, window_size=(7, 0), causal=True, page_size=1, capacity=44),
    case("chunk", attention_chunk=6),
    case("chunk-causal", seqlen_q=5, causal=True, attention_chunk=6, page_size=4),
    case("chunk-both-sides", seqlen_q=5, attention_chunk=4, page_size=1, capacity=41),
    case("chunk-longer-than-keys", seqlen_q=5, attention_chunk=1000, lengths=(3, 0, 20)),
    case("chunk-leftpad", seqlen_q=4, attention_chunk=7, leftpad=(3, 0, 29), window_size=(5, 1),
         batch_idx=(4, 0, 2)),
    case("chunk-append", new=3, seqlen_q=3, attention_chunk=5, rotary_dim=16, page_size=4),
    case("chunk-ragged", seqlen_q=(4, 0, 9), attention_chunk=8, leftpad=(2, 0, 5), page_size=4,
         sink="float32"),
    case("chunk-splits", lengths=(17, 1, 48), seqlen_q=3, attention_chunk=16, causal=True, num_splits=3),
    case("chunk-fp8", seqlen_q=2, attention_chunk=9, cache_dtype=FP8, descale="sequence", page_size=4,
         softcap=4.0),
    case("softcap", seqlen_q=2, softcap=3.0, page_size=4),
    case("scale", softmax_scale=0.7, page_size=4),
    case("negative-scale", softmax_scale=-0.3),
    case("alibi", seqlen_q=3, alibi="head", causal=True, page_size=4),
    case("alibi-by-batch", seqlen_q=2, alibi="batch", softcap=5.0),
    case("sink", seqlen_q=2, sink="own", causal=True, page_size=4),
    case("sink-without-keys", sink="float32", lengths=(0, 3, 0)),
    case("leftpad", leftpad=(3, 0, 40), seqlen_q=2),
    case("leftpad-paged", leftpad=(9, 1, 5), seqlen_q=2, page_size=4, causal=True),
    case("batch-idx", batch_idx=(4, 0, 2)),
    case("append", new=1),
    case("append-paged", new=1, page_size=4, causal=True),
    case("append-many", new=6, seqlen_q=6, page_size=4, causal=True),
    case("append-fewer-than-queries", new=2, seqlen_q=4, page_size=4, causal=True),
    case("append-nothing", new=0, page_size=4),
    case("append-to-capacity", new=3, seqlen_q=3, lengths=(45, 0, 44), page_size=4, causal=True),
    case("append-to-capacity-dense", new=1, lengths=(47, 46, 0)),
    case("append-to-empty", new=4, seqlen_q=4, lengths=(0, 0, 0), page_size=3, causal=True),
    case("append-batch-idx", new=2, batch_idx=(3, 1, 0)),
    case("append-ragged", new=(3, 0, 5), seqlen_q=(3, 0, 5), page_size=4, causal=True),
    case("append-ragged-one-query", new=(1, 2, 0), page_size=4),
    case("ragged-queries", seqlen_q=(1, 0, 7), page_size=4, causal=True),
    case("ragged-queries-dense", seqlen_q=(4, 2, 1), window_size=(5, 0)),
    case("rotary", new=2, seqlen_q=2, rotary_dim=16, page_size=4, causal=True),
    case("rotary-llama", new=2, seqlen_q=2, rotary_dim=16, rotary_interleaved=False, causal=True),
    case("rotary-partial", new=1, rotary_dim=6, page_size=4),
    case("rotary-partial-llama", new=3, seqlen_q=3, rotary_dim=10, rotary_interleaved=False),
    case("rotary-all-queries-at-once", new=3, seqlen_q=3, rotary_dim=16, page_size=4),
    case("rotary-ragged", new=(2, 1, 4), seqlen_q=(2, 1, 4), rotary_dim=8, page_size=4, window_size=(9, 0)),
    case("rotary-leftpad", new=1, rotary_dim=16, leftpad=(2, 0, 7), rotary_seqlens=(15, 1, 33)),
    case("fp8", cache_dtype=FP8, page_size=4),
    case("fp8-by-head", cache_dtype=FP8, descale="head", page_size=4, seqlen_q=2, causal=True),
    case("fp8-by-block", cache_dtype=FP8, descale="block", page_size=4, softcap=4.0),
    case("fp8-dense-by-row", cache_dtype=FP8, descale="block"),
    case("fp8-append", cache_dtype=FP8, descale="block", page_size=4, new=3, seqlen_q=3, causal=True),
    case("fp8-append-rotary", cache_dtype=FP8, descale="head", page_size=2, new=2, rotary_dim=16),
    case("fp8-by-sequence", cache_dtype=FP8, descale="sequence", page_size=4, seqlen_q=2, causal=True),
    case("fp8-append-by-sequence", cache_dtype=FP8, descale="sequence", new=(2, 1, 4), seqlen_q=(2, 1, 4)),
    case("tree", seqlen_q=6, new=6, tree="shared", page_size=4),
    case("tree-by-batch", seqlen_q=5, tree="batch"),
    case("tree-ragged", seqlen_q=(5, 0, 3), new=(5, 0, 3), tree="batch", page_size=4),
    case("tree-longer-than-keys", seqlen_q=6, tree="shared", lengths=(4, 0, 9)),
    case("everything", seqlen_q=3, new=3, rotary_dim=12, page_size=5, capacity=50, leftpad=(2, 0, 4),
         causal=True, window_size=(20, 0), softcap=6.0, alibi="batch", sink="float32", head_dim_v=24,
         heads=(6, 2)),
    case("two-splits", lengths=(17, 1, 48), num_splits=2, page_size=4),
    case("more-splits-than-keys", lengths=(3, 0, 48), num_splits=7, seqlen_q=2, causal=True),
    case("one-split", num_splits=1, page_size=4),
    case("split-size", split_size=16, page_size=4, sink="own"),
)  # fmt: skip


def build(
    case: DecodeCase, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ((q, k_cache, v_cache, k, v), other arguments of the call by name)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, dtype=drawn).to(dtype)

    def int32(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    heads, heads_kv = case.heads
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    batch = 3 if case.lengths is None else len(case.lengths)
    arguments = dict(case.arguments)
    q = _tokens(case.seqlen_q, batch, (heads, case.head_dim), normal)
    if isinstance(case.seqlen_q, tuple):
        arguments |= _offsets("q", case.seqlen_q, int32)
    k = v = None
    added = (0,) * batch
    if case.new is not None:
        k = _tokens(case.new, batch, (heads_kv, case.head_dim), normal)
        v = _tokens(case.new, batch, (heads_kv, head_dim_v), normal)
        added = case.new if isinstance(case.new, tuple) else (case.new,) * batch
        if isinstance(case.new, tuple):
            arguments |= _offsets("k_new", case.new, int32)
    before = (case.capacity,) * batch if case.lengths is None else case.lengths
    if case.lengths is not None:
        arguments["cache_seqlens"] = int32(case.lengths)

    places, table, rows, width = _places(case, before, added, generator)
    if table is not None:
        arguments["block_table"] = table.to(device)
    elif case.batch_idx is not None:
        arguments["cache_batch_idx"] = int32(case.batch_idx)
    cache_dtype = case.cache_dtype or dtype
    caches = []
    for dim in (case.head_dim, head_dim_v):
        cache = torch.full((rows, width, heads_kv, dim), torch.nan, dtype=dtype)
        for b in range(batch):
            for i in range(before[b]):
                cache[places(b, i)] = normal(heads_kv, dim)
        cache = cache.to(cache_dtype).to(device)
        caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if case.transposed else cache)

    if case.descale is not None:
        by = {"head": (heads_kv,), "block": (rows, heads_kv), "sequence": (batch, 1, heads_kv)}
        for name in ("k_descale", "v_descale"):
            arguments[name] = (0.25 + torch.rand(by[case.descale], generator=generator)).to(device)
    if case.rotary_dim is not None:
        angles = torch.rand((max(64, case.capacity), case.rotary_dim // 2), generator=generator) * 6.28
        arguments |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    for name in ("leftpad", "rotary_seqlens"):
        values = getattr(case, name)
        if values is not None:
            arguments["cache_leftpad" if name == "leftpad" else name] = int32(values)
    if case.alibi is not None:
        shape = (heads,) if case.alibi == "head" else (batch, heads)
        arguments["alibi_slopes"] = torch.randint(0, 64, shape, generator=generator) / 256
    if case.sink is not None:
        sink = torch.randn(heads, generator=generator)
        arguments["sink"] = sink.to(dtype) if case.sink == "own" else sink
    if case.tree is not None:
        side = max(case.seqlen_q) if isinstance(case.seqlen_q, tuple) else case.seqlen_q
        shape = (side, side) if case.tree == "shared" else (batch, side, side)
        arguments["tree_mask"] = torch.rand(shape, generator=generator) < 0.5
    moved = {name: a.to(device) if isinstance(a, Tensor) else a for name, a in arguments.items()}
    tensors = (q, *caches, k, v)
    return tuple(t if t is None else t.to(device) for t in tensors), moved


def _tokens(count: int | tuple[int, ...], batch: int, tail: tuple[int, int], normal: Any) -> Tensor:
    """Return (batch, count, *tail), or for a tuple packed (sum + 1, *tail), whose last token is unused."""
    if isinstance(count, int):
        return normal(batch, count, *tail)
    return normal(sum(count) + 1, *tail)


def _offsets(name: str, lengths: tuple[int, ...], int32: Any) -> dict[str, Any]:
    sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return {f"cu_seqlens_{name}": int32(sums), f"max_seqlen_{name}": max(lengths)}


def _places(
    case: DecodeCase, before: tuple[int, ...], added: tuple[int, ...], generator: torch.Generator
) -> tuple[Any, Tensor | None, int, int]:
    """Return (function of (b, i) -> (row, token) in the cache, block table, rows, tokens per row)."""
    if case.page_size is None:
        rows = case.batch_idx or tuple(range(len(before)))
        return (lambda b, i: (rows[b], i)), None, max(rows) + 1, case.capacity
    page_size, columns = case.page_size, -(-case.capacity // case.page_size)
    pool = torch.randperm(len(before) * columns + 2, generator=generator).int()
    table = torch.full((len(before), columns), NOBODY, dtype=torch.int32)
    for b in range(len(before)):
        used = -(-(before[b] + added[b]) // page_size)
        table[b, :used] = pool[b * columns : b * columns + used]
    return (lambda b, i: (int(table[b, i // page_size]), i % page_size)), table, len(pool), page_size


def paged(
    contexts: list[int],
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    head_dim_v: int | None = None,
    page_size: int = 16,
    seqlen_q: int | tuple[int, ...] = 1,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
    device: str = "cuda",
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return ((q, k_cache, v_cache), other arguments) of a decoding call on ``device``.

    Memory of the caches that no sequence uses is NaN, and unused entries of the block table are out of range.
    A tuple ``seqlen_q`` is a packed batch. ``page_size`` 0 is a dense cache with sequences in random order.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    dense = page_size == 0
    page_size = page_size or max([*contexts, 1]) + 3
    columns = -(-max([*contexts, 1]) // page_size)
    used = [-(-context // page_size) for context in contexts]
    blocks = sum(used) + 3
    order = torch.randperm(blocks, generator=generator, device=device).int()
    table = torch.full((len(contexts), columns), 2**31 - 1, dtype=torch.int32, device=device)
    caches = []
    for dim in (head_dim, head_dim_v or head_dim):
        shape = (blocks, page_size, heads[1], dim)
        caches.append(torch.randn(shape, generator=generator, device=device).to(cache_dtype or dtype))
    start = 0
    for b, count in enumerate(used):
        table[b, :count] = order[start : start + count]
        if count and contexts[b] % page_size:
            for cache in caches:
                cache[order[start + count - 1].item(), contexts[b] % page_size :] = torch.nan
        start += count
    for cache in caches:
        cache[order[start:].long()] = torch.nan
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"cache_seqlens": lengths}
    if dense:
        arguments["cache_batch_idx"] = torch.where(lengths > 0, table[:, 0], order[-1])
    else:
        arguments["block_table"] = table
    rows: tuple[int, ...] = (len(contexts), seqlen_q) if isinstance(seqlen_q, int) else (sum(seqlen_q) + 1,)
    if isinstance(seqlen_q, tuple):
        arguments |= _offsets("q", seqlen_q, partial(torch.tensor, dtype=torch.int32, device=device))
    q = torch.randn((*rows, heads[0], head_dim), generator=generator, device=device).to(dtype)
    return (q, *caches), arguments


def check_mass_of_nan(backend: str) -> None:
    """Check that a row with NaN makes the mass of the keys that it sees NaN, and changes no other."""
    (q, *caches), arguments = paged([20, 9], (4, 2), 16, page_size=4, seqlen_q=3, dtype=FP32, device="cpu")
    keys = torch.arange(14, 18)
    places = arguments["block_table"][0, keys // 4].long(), keys % 4
    add = partial(flashtile.flash_attn_with_kvcache, causal=True, window_size=(3, 0), backend=backend)
    clean = torch.zeros(caches[0].shape[:3])
    add(q, *caches, mass=clean, **arguments)
    seen = torch.zeros_like(clean, dtype=torch.bool)
    seen[places] = True
    for by_query in (True, False):  # NaN in the query at position 17, or in the first key that only it sees
        poisoned = [q.clone(), caches[0].clone()]
        if by_query:
            poisoned[0][0, 0] = torch.nan
        else:
            poisoned[1][places[0][0], places[1][0]] = torch.nan
        mass = torch.zeros_like(clean)
        add(*poisoned, caches[1], mass=mass, **arguments)
        assert torch.equal(mass.isnan(), seen)
        assert torch.equal(mass[~seen], clean[~seen])
