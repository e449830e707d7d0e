"""Family of calls over dense and paged KV caches: decoding, appending, copies, and combining partial results."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from flashtile.problems.masking import BEYOND_WINDOW
from fuzz.attention import (
    _call,
    by_position,
    dtype_for,
    in_surroundings,
    laid_out,
    masking,
    sizes_for,
    spelled,
)
from fuzz.runner import Call

CALL = """def call(attend, NAMES):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out, lse = attend(q, k_cache, v_cache, OPTIONS, return_softmax_lse=True)
    return out, lse, k_cache, v_cache
agree(call, {ours}, {exact}, gradients=False, GIVEN)"""


MASS = CALL.replace("v_cache.clone()\n", "v_cache.clone()\n    mass = mass.clone()\n").replace(
    "k_cache, v_cache\nagree", "k_cache, v_cache, mass\nagree"
)


def _ints(values: list[int]) -> str:
    return f"ints({', '.join([*map(str, values), 'device=device'])})"


def _decode(rng: Random, function: str = "flashtile.flash_attn_with_kvcache", adds: bool = False) -> str:
    """Return the text of a function of caches. Calls that write to a cache cannot run under vmap.

    A call that ``adds`` to a buffer cannot run where it runs twice.
    """
    return in_surroundings(rng, function, ("vmap", *["inference mode before"] * adds))


def _with_mass(rng: Random, tensors: dict[str, str], options: list[str]) -> str:
    """Add a buffer for mass to some calls, and return the text of the call."""
    adds = rng.random() < 0.2
    if adds:
        shape = tensors["k_cache"].removeprefix("rand(").split(", head_dim,")[0]
        tensors["mass"] = f"rand({shape}, device=device, seed=43).abs()"
        options.append("mass=mass")
    return (MASS if adds else CALL).format(ours=_decode(rng, adds=adds), exact="oracle.with_kvcache")


def cache(rng: Random, sizes: dict[str, int], new: int, paged: bool, dtype: str = "dtype"):
    """Draw a dense or paged cache with room for ``new`` more tokens: return (tensors, options, lengths)."""
    batch, capacity = sizes["batch"], sizes["seqlen_k"] + new
    lengths = [rng.choice([0, rng.randint(0, capacity - new), capacity - new]) for _ in range(batch)]
    options = [f"cache_seqlens={_ints(lengths)}"]
    if paged:
        page = rng.choice([1, 4, 16, 16, 64])
        width = -(-capacity // page)
        pages = list(range(batch * width + rng.randint(0, 3)))
        rng.shuffle(pages)
        rows = [pages[b * width : (b + 1) * width] for b in range(batch)]
        common = 0 if new or rng.random() < 0.7 else rng.randint(0, width)  # keys that all sequences have
        table = ", ".join(str(page) for row in rows for page in rows[0][:common] + row[common:])
        options.append(f"block_table=ints({table}{', ' * (table != '')}device=device).view({batch}, {width})")
        shape = f"{len(pages)}, {page}, heads_kv"
    else:
        rows = batch + rng.randint(0, 2)
        if rows > batch:
            draw_rows = rng.sample if new or rng.random() < 0.7 else rng.choices
            options.append(f"cache_batch_idx={_ints(draw_rows(range(rows), k=batch))}")
        shape = f"{rows}, {capacity}, heads_kv"
    made = {
        name: f"rand({shape}, {dim}, device=device, seed={seed}).to({dtype})"
        for name, dim, seed in (("k_cache", "head_dim", 41), ("v_cache", "head_dim_v", 42))
    }
    return made, options, lengths


def draw(rng: Random, device: str = "cpu") -> Call:
    sizes = sizes_for(rng, 150)
    sizes["seqlen_q"] = rng.choice([1, 1, 2, 4, 7])
    fixed = {"dtype": dtype_for(rng, device), "device": repr(device)}
    form = rng.choice(
        ["cache"] * 6 + ["fp8", "prefix", "append", "slots", "copy", "combine", "metadata", "profile"]
    )
    return _FORMS[form](rng, sizes, fixed)


def _cache(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    paged, new = rng.random() < 0.5, rng.choice([0, 0, 1, sizes["seqlen_q"], 5])
    sizes["heads_kv"] = rng.choice([sizes["heads_kv"], sizes["heads_kv"], 8, 9])
    tensors = {"q": laid_out(rng, "batch, seqlen_q, heads, head_dim", 1)}
    made, options, lengths = cache(rng, sizes, new, paged)
    tensors |= made
    more = masking(rng) + by_position(rng)
    if new:
        shape = f"batch, {new}, heads_kv, head_dim"
        tensors |= {"k": laid_out(rng, shape, 2), "v": laid_out(rng, f"{shape}_v", 3)}
        options = ["k=k, v=v"] + options
        if rng.random() < 0.4 and sizes["head_dim"] >= 8:
            half = rng.randint(1, sizes["head_dim"] // 2)
            if half * 2 <= sizes["head_dim"]:
                tensors["_angles"] = (
                    f"torch.arange(400.0, device=device)[:, None] * 0.7 ** torch.arange({half}, device=device)"
                )
                more.append(
                    "rotary_cos=_angles.cos().to(dtype), rotary_sin=_angles.sin().to(dtype), "
                    f"rotary_interleaved={rng.random() < 0.5}"
                )
                if rng.random() < 0.3:
                    more.append(f"rotary_seqlens={_ints([rng.randint(0, 90) for _ in lengths])}")
    if rng.random() < 0.15 and not new and sizes["batch"]:
        more = [o for o in more if not o.startswith(("causal", "window", *BEYOND_WINDOW))]
        shape = rng.choice(["seqlen_q, seqlen_q", "batch, seqlen_q, seqlen_q"])
        options[0] = (
            options[0]
            if min(lengths, default=0) >= sizes["seqlen_q"]
            else f"cache_seqlens={_ints([sizes['seqlen_k']] * len(lengths))}"
        )
        if sizes["seqlen_k"] >= sizes["seqlen_q"]:
            tensors["_tree"] = f"rand({shape}, device=device, seed=5) > 0"
            more.append("tree_mask=_tree")
    elif rng.random() < 0.15:
        tensors["_slopes"] = f"rand({rng.choice(['heads', 'batch, heads'])}, device=device, seed=6).abs()"
        more.append("alibi_slopes=_slopes")
    if rng.random() < 0.2:
        tensors["_sink"] = "rand(heads, dtype=dtype, device=device, seed=7)"
        more.append("sink=_sink")
    if rng.random() < 0.15 and not paged:
        more.append(f"cache_leftpad={_ints([rng.randint(0, n) for n in lengths])}")
    if rng.random() < 0.3:
        orders = ["num_splits=1", "num_splits=3", "split_size=16", "split_size=64", "invariant=True"]
        more.append(rng.choice(orders[: 5 - ("tree_mask=_tree" in more)]))
    if rng.random() < 0.15 and "invariant=True" not in more:
        more.append(f"softmax_max={rng.choice([0.0, 4.0, -3.0, 60.0])}")
    if rng.random() < 0.15:
        tensors["qv"] = "rand(batch, seqlen_q, heads, head_dim_v, dtype=dtype, device=device, seed=8)"
        more.append("qv=qv")
    elif rng.random() < 0.2 and not new:  # packed queries
        counts = [rng.randint(0, sizes["seqlen_q"]) for _ in lengths]
        tensors["q"] = laid_out(rng, f"{sum(counts)}, heads, head_dim", 1)
        more.append(f"cu_seqlens_q=offsets{_call(counts)}, max_seqlen_q=seqlen_q")
    body = _with_mass(rng, tensors, more)
    return Call(body, sizes, spelled(tensors), (*options, *more), fixed)


def _fp8(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    fixed["dtype"] = rng.choice(["torch.bfloat16", "torch.float16", "torch.float32"])
    made, options, _ = cache(rng, sizes, 0, rng.random() < 0.5, "torch.float8_e4m3fn")
    tensors = {"q": laid_out(rng, "batch, seqlen_q, heads, head_dim", 1), **made}
    if rng.random() < 0.7:
        tensors["_scales"] = "rand(2, heads_kv, device=device, seed=9).abs()"
        options.append("k_descale=_scales[0], v_descale=_scales[1]")
    body = _with_mass(rng, tensors, options)
    return Call(body, sizes, spelled(tensors), (*options, *masking(rng), *by_position(rng)), fixed)


def _prefix(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    """Groups of sequences that share their first keys, by the public function, or groups within groups."""
    batch, page, sq = rng.randint(1, 6), rng.choice([4, 16]), sizes["seqlen_q"]
    outer = sorted([0, batch, *(rng.randint(0, batch) for _ in range(rng.randint(0, 2)))])
    inner = sorted([*outer, *(rng.randint(0, batch) for _ in range(2))])
    ends = [rng.randint(0, 40) * (a < b) for a, b in pairwise(outer)]
    group = [max(g for g, start in enumerate(outer[:-1]) if start <= b) for b in range(batch)]
    subgroup = [max(g for g, start in enumerate(inner[:-1]) if start <= b) for b in range(batch)]
    nested = rng.random() < 0.5
    first = [ends[group[a]] if a < b else 0 for a, b in pairwise(inner)]
    last = [
        begin + nested * (a < b) * rng.randint(0, 25)
        for begin, (a, b) in zip(first, pairwise(inner), strict=True)
    ]
    shared = [last[g] for g in subgroup]
    lengths = [keys + sq + rng.randint(0, 30) for keys in shared]
    pages: dict[tuple, int] = {}  # by what holds them: a group, one within it, or a sequence
    rows = [
        [
            pages.setdefault((i, *([group[b]] if i * page < ends[group[b]] else [-1, subgroup[b]] if i * page < shared[b] else [b] * 3)), len(pages))
            for i in range(-(-max(lengths) // page))
        ]
        for b in range(batch)
    ]  # fmt: skip
    shape = f"rand({len(pages)}, {page}, heads_kv, head_dim{{}}, dtype=dtype, device=device, seed={{}})"
    tensors = {
        "q": laid_out(rng, "batch, seqlen_q, heads, head_dim", 1),
        "k_cache": shape.format("", 2), "v_cache": shape.format("_v", 3),
    }  # fmt: skip
    options = [o for o in masking(rng) if not o.startswith("window")]
    if rng.random() < 0.3:
        tensors["_sink"] = "rand(heads, device=device, seed=7)"
        options.append("sink=_sink")
    table = f"block_table=ints({', '.join(map(str, rows))}, device=device), cache_seqlens={_ints(lengths)}"
    fixed = {**fixed, "batch": str(batch)}
    sizes = {name: size for name, size in sizes.items() if name not in ("batch", "seqlen_q")}  # of the table
    fixed["seqlen_q"] = str(sq)
    if nested:
        levels = f"(({outer}, {[0] * len(ends)}, {ends}), ({inner}, {first}, {last}))"
        ours = f"lambda *tensors, return_softmax_lse, **o: cascade(*tensors, {levels}, {_ints(shared)}, **o)"
        body = CALL.replace("OPTIONS", f"{table}, OPTIONS").format(ours=ours, exact="oracle.with_kvcache")
        return Call(body, sizes, spelled(tensors), tuple(options), fixed)
    prefix = rng.choice([f"prefix_seqlens={ends[0]}", f"prefix_seqlens={_ints(ends)}"])
    if len(ends) > 1:
        prefix = f"prefix_seqlens={_ints(ends)}, cu_prefix_groups={_ints(outer)}"
    body = CALL.replace("OPTIONS", f"{table}, {prefix}, OPTIONS")
    exact = "lambda *t, prefix_seqlens, cu_prefix_groups=None, **o: oracle.with_kvcache(*t, **o)"
    body = body.format(ours=_decode(rng, "flashtile.flash_attn_with_shared_prefix"), exact=exact)
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _append(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    new = rng.randint(1, 6)
    made, options, _ = cache(rng, sizes, new, rng.random() < 0.5)
    shape = f"batch, {new}, heads_kv, head_dim"
    tensors = {**made, "k": laid_out(rng, shape, 2), "v": laid_out(rng, f"{shape}_v", 3)}
    body = """def exact(k_cache, v_cache, k, v, **options):
    oracle.with_kvcache(k[:, :0], k_cache, v_cache, k, v, **options)
def call(append, NAMES):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    append(k_cache, v_cache, k, v, OPTIONS)
    return k_cache, v_cache
agree(call, OURS, exact, gradients=False, GIVEN)""".replace("OURS", _decode(rng, "flashtile.append_kvcache"))
    return Call(body, sizes, tensors, tuple(options), fixed)


def _slots(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    tokens, pages, page = rng.randint(1, 9), 3, rng.choice([4, 16])
    slots = [s if rng.random() < 0.8 else -1 for s in rng.sample(range(pages * page), tokens)]
    shape = "rand({}, heads_kv, head_dim{}, dtype=dtype, device=device, seed={})"
    tensors = {
        "k_cache": shape.format(f"{pages}, {page}", "", 1), "v_cache": shape.format(f"{pages}, {page}", "_v", 2),
        "k": shape.format(tokens, "", 3), "v": shape.format(tokens, "_v", 4),
    }  # fmt: skip
    body = f"""slots = torch.tensor({slots}, device=device)
def exact(k_cache, v_cache, k, v, slot_mapping):
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]
def call(append, NAMES):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    append(k_cache, v_cache, k, v, slot_mapping=slots)
    return k_cache, v_cache
agree(call, flashtile.append_kvcache, exact, gradients=False, GIVEN)"""
    return Call(body, sizes, tensors, (), fixed)


def _copy(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    blocks = rng.randint(4, 9)
    chosen = rng.sample(range(blocks), 4)
    pairs = [[chosen[0], chosen[1]], [chosen[0], chosen[2]], [-1, chosen[3]]][: rng.randint(1, 3)]
    shape = f"rand({rng.choice(['', '2, '])}{blocks}, 4, heads_kv, head_dim{{}}, dtype=dtype, device=device, seed={{}})"
    tensors = {"k_cache": shape.format("", 1), "v_cache": shape.format("_v", 2)}
    body = f"""pairs = torch.tensor({pairs}, device=device)
def exact(k_cache, v_cache, pairs):
    for cache in (k_cache, v_cache):
        for source, target in pairs.tolist():
            if source >= 0:
                cache[..., target, :, :, :] = cache[..., source, :, :, :].clone()
def call(copy, NAMES):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    copy(k_cache, v_cache, pairs)
    return k_cache, v_cache
agree(call, flashtile.copy_blocks, exact, gradients=False, GIVEN)"""
    return Call(body, sizes, tensors, (), fixed)


def _combine(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    parts = rng.randint(1, 5)
    kind = "torch.promote_types(dtype, torch.float32)"
    tensors = {
        "out_partial": f"rand({parts}, batch, seqlen_q, heads, head_dim_v, dtype=dtype, device=device, seed=1)",
        "lse_partial": f"rand({parts}, batch, seqlen_q, heads, dtype={kind}, device=device, seed=2, scale=3.0)",
    }
    body = """lse_partial[0, :1, :1] = -math.inf
def exact(outs, lses):
    out, lse = oracle.merged(outs, lses.mT)
    return out, lse.mT
def call(combine, NAMES):
    return combine(out_partial, lse_partial)
agree(call, flashtile.flash_attn_combine, exact, gradients=False, GIVEN)"""
    return Call(body, sizes, spelled(tensors), (), fixed)


def _metadata(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    """Decoding by the function with FlashAttention-3's argument names."""
    sizes["head_dim_v"] = sizes["head_dim"]
    made, options, _ = cache(rng, sizes, 0, rng.random() < 0.5)
    tensors = {"q": "rand(batch, seqlen_q, heads, head_dim, dtype=dtype, device=device, seed=1)", **made}
    options = [o.replace("block_table", "page_table") for o in options] + masking(rng)
    options += by_position(rng, ("attention_chunk",))
    exact = "lambda *t, page_table=None, **o: oracle.with_kvcache(*t, block_table=page_table, **o)"
    body = CALL.format(ours="flash_attn_interface.flash_attn_with_kvcache", exact=exact)
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _profile(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    sizes = {name: max(size, 1) for name, size in sizes.items()}  # a profile of no scores is refused
    sizes["seqlen_q"] = rng.randint(1, min(sizes["seqlen_k"], 20))
    tensors = {
        "q": "rand(batch, seqlen_q, heads, head_dim, dtype=dtype, device=device, seed=1)",
        "k": "rand(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, device=device, seed=2)",
    }
    body = """def exact(q, k, causal=True, softmax_scale=None, softcap=0.0):
    s = oracle.wide(q).transpose(1, 2) @ k.repeat_interleave(group, 2).transpose(1, 2).mT
    s = s * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s[oracle.seen_by(seqlen_q, seqlen_k, causal).expand_as(s)]
    return torch.stack([s.min(), s.max()])
def ours(q, k, **options):
    found = flashtile.profile_scores(q, k, **options)
    return torch.tensor([found.least, found.most], device=device)
def call(profile, NAMES):
    return profile(q, k, OPTIONS)
agree(call, ours, exact, gradients=False, scores_at=min(dtype, torch.float32, key=lambda d: d.itemsize), GIVEN)"""
    options = [o for o in masking(rng) if not o.startswith("window")]
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


_FORMS = {
    "cache": _cache, "fp8": _fp8, "prefix": _prefix, "append": _append, "slots": _slots, "copy": _copy,
    "combine": _combine, "metadata": _metadata, "profile": _profile,
}  # fmt: skip
