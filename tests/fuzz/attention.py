"""Family of calls of every attention function of the public API, with all arguments, forward and backward."""

from __future__ import annotations

import re
from random import Random

from flashtile.problems.masking import BEYOND_WINDOW
from fuzz.prelude import SURROUNDINGS
from fuzz.runner import Call

DTYPES = ("torch.float32", "torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")
LAYOUTS = (*("contiguous",) * 4, *("offset", "transposed") * 2, "overlapping", "negated")


def dtype_for(rng: Random, device: str) -> str:
    return rng.choice([d for d in DTYPES if device == "cpu" or d != "torch.float64"])


def sizes_for(rng: Random, longest: int = 70) -> dict[str, int]:
    """Draw sizes: short lengths, multiples of tiles and others, and more queries than keys among them.

    One time in twenty there are no sequences, queries or keys.
    """

    def length() -> int:
        return rng.choice(
            [1, 2, 3, rng.randint(4, 20), rng.randint(4, longest), rng.choice([16, 32, 64, 65])]
        )

    same = length()
    sizes = {
        "batch": rng.randint(1, 3),
        "seqlen_q": same if rng.random() < 0.4 else length(),
        "seqlen_k": same if rng.random() < 0.4 else length(),
        "group": rng.choice([1, 1, 2, 3, rng.choice([4, 5, 6, 7, 12, 14])]),
        "heads_kv": rng.choice([1, 2, 3]),
        "head_dim": rng.choice([1, 5, 8, 16, 16, 24, 32, 33, 64, rng.choice([64, 128, 128, 200])]),
        "head_dim_v": rng.choice([8, 16, 16, 32, 20, rng.choice([64, 128])]),
    }
    if rng.random() < 0.01:
        sizes[rng.choice(["head_dim", "head_dim_v"])] = 512
    if rng.random() < 0.05:
        sizes[rng.choice(["batch", "seqlen_q", "seqlen_k"])] = 0
    return sizes


def in_surroundings(rng: Random, function: str, but: tuple[str, ...] = ()) -> str:
    """Return the text of a function, one time in five of one that is called in one of SURROUNDINGS."""
    ways = [way for way in SURROUNDINGS if way not in but]
    if rng.random() < 0.2:
        return f"surrounded({function}, {rng.choice(ways)!r}, {rng.randrange(4)})"
    return function


def laid_out(rng: Random, shape: str, seed: int, layouts: tuple[str, ...] = LAYOUTS) -> str:
    """Return the text of a tensor of normal numbers in a layout that is drawn."""
    layout = rng.choice(layouts)
    more = "" if layout == "contiguous" else f", layout={layout!r}"
    return f"rand({shape}, dtype=dtype, device=device, seed={seed}{more})"


def qkv(rng: Random, varlen: bool, seed: int) -> dict[str, str]:
    rows, keys = ("total_q", "total_k") if varlen else ("batch, seqlen_q", "batch, seqlen_k")
    made = {}
    shapes = (rows, "heads", "head_dim"), (keys, "heads_kv", "head_dim"), (keys, "heads_kv", "head_dim_v")
    for n, (name, (tokens, heads, dim)) in enumerate(zip("qkv", shapes, strict=True)):
        made[name] = laid_out(rng, f"{tokens}, {heads}, {dim}", seed + n)
    return made


def masking(rng: Random) -> list[str]:
    """Draw options that every attention function has, as texts."""
    window = (rng.choice([-1, 0, 1, rng.randint(2, 40)]), rng.choice([-1, 0, 1, rng.randint(2, 40)]))
    drawn = [
        (0.4, "causal=True"),
        (0.3, f"window_size={window}"),
        (0.2, f"softcap={rng.choice([0.5, 2.0, 30.0])}"),
        (0.2, f"softmax_scale={rng.choice([0.0, -0.3, 0.125, 1.0, 3.0])}"),
    ]
    return [text for share, text in drawn if rng.random() < share]


def by_position(rng: Random, names: tuple[str, ...] = BEYOND_WINDOW) -> list[str]:
    """Draw options of the mask other than the window, as texts."""
    return [f"{name}={rng.choice([1, 3, 16])}" for name in names if rng.random() < 0.1]


def lengths(rng: Random, count: int, most: int) -> list[int]:
    return [rng.choice([0, min(1, most), rng.randint(0, most), most]) for _ in range(count)]


def packed(rng: Random, sizes: dict[str, int], same: bool = False) -> tuple[list[str], dict[str, str]]:
    """Draw a packed batch: return (options with ``cu_seqlens`` and ``max_seqlen``, numbers of tokens by name)."""
    of_q = lengths(rng, sizes["batch"], sizes["seqlen_q"])
    of_k = of_q if same else lengths(rng, sizes["batch"], sizes["seqlen_k"])
    tail = rng.choice([0, 0, 2])
    fixed = {"total_q": str(sum(of_q) + tail), "total_k": str(sum(of_k) + tail)}
    text = (
        f"cu_seqlens_q=offsets{_call(of_q)}, cu_seqlens_k=offsets{_call(of_k)}, max_seqlen_q={max(of_q, default=0)}, "
        f"max_seqlen_k={max(of_k, default=0)}"
    )
    return [text], fixed | {"longest_q": str(max(of_q, default=0)), "longest_k": str(max(of_k, default=0))}


def _call(values: list[int]) -> str:
    return f"({', '.join([*map(str, values), 'device=device'])})"


def extras(rng: Random, sizes: dict[str, int], varlen: bool, of_k: list[int] | None = None):
    """Draw optional tensors of :func:`flashtile.attention`: return (options, tensors) as texts."""
    options, tensors = [], {}
    sides = ("longest_q", "longest_k") if varlen else ("seqlen_q", "seqlen_k")
    shape = f"{rng.choice(['1', 'batch'])}, {rng.choice(['1', 'heads'])}, {rng.choice(['1', sides[0]])}, {sides[1]}"
    if rng.random() < 0.15:
        slopes = rng.choice(["heads", "batch, heads"])
        tensors["alibi_slopes" if rng.random() < 0.3 else "_slopes"] = (
            f"rand({slopes}, device=device, seed=21).abs()"
        )
        options.append(f"alibi_slopes={[*tensors][-1]}")
    if rng.random() < 0.2:
        kind = rng.choice(["dtype", "torch.promote_types(dtype, torch.float32)"])
        tensors["sink"] = f"rand(heads, dtype={kind}, device=device, seed=22)"
        options.append("sink=sink")
    if rng.random() < 0.2:
        tensors["_mask"] = f"rand({shape}, device=device, seed=23) > {rng.choice([-1.0, 0.0, 1.5])}"
        options.append("mask=_mask")
    if rng.random() < 0.2:
        tensors["bias"] = f"rand({shape}, dtype=dtype, device=device, seed=24)"
        options.append("bias=bias")
    if rng.random() < 0.15 and not varlen:
        tensors["_there"] = f"rand(batch, seqlen_k, device=device, seed=25) > {rng.choice([-1.0, 0.0])}"
        options.append("key_padding_mask=_there")
    options += by_position(rng)
    if rng.random() < 0.1:
        tensors["qv"] = (
            f"rand({'total_q' if varlen else 'batch, seqlen_q'}, heads, head_dim_v, dtype=dtype, device=device, seed=26)"
        )
        options.append("qv=qv")
    if rng.random() < 0.1 and not varlen:
        options.append(f"seqused_k=ints{_call(lengths(rng, sizes['batch'], sizes['seqlen_k']))}")
        if rng.random() < 0.5:
            options.append(f"seqused_q=ints{_call(lengths(rng, sizes['batch'], sizes['seqlen_q']))}")
    if rng.random() < 0.1:
        options.append("deterministic=True")
    return options, tensors


BODY = """def call(attend, {names}):
    return attend({positional}, OPTIONS, {last})
agree(call, {ours}, {exact}, GIVEN)"""


def draw(rng: Random, device: str = "cpu") -> Call:
    form = rng.choice(
        ["attention"] * 8
        + ["flash_attn_func", "kvpacked", "qkvpacked", "weights", "merge_states", "dropout", "tree", "jvp"]
    )
    varlen = rng.random() < 0.35 and form not in ("merge_states", "dropout", "flash_attn_func", "tree")
    sizes = sizes_for(rng)
    if form in ("attention", "flash_attn_func") and rng.random() < 0.04:  # programs divide the keys
        sizes |= {"batch": 1, "heads_kv": 1, "seqlen_q": rng.randint(1, 200)}
        sizes["seqlen_k"] = rng.randint(500, 1500) * (1 if device == "cpu" else 5)
    if "packed" in form:
        sizes["head_dim_v"] = sizes["head_dim"]
    if form == "qkvpacked":
        sizes["seqlen_k"], sizes["group"] = sizes["seqlen_q"], 1
    fixed = {"dtype": dtype_for(rng, device), "device": repr(device)}
    options, tensors = [], qkv(rng, varlen, rng.randrange(1000))
    if varlen:
        options, totals = packed(rng, sizes, form == "qkvpacked")
        fixed |= totals
    options += masking(rng)
    if form in ("attention", "weights", "dropout", "jvp"):
        more, of_them = extras(rng, sizes, varlen)
        options, tensors = options + more, tensors | of_them
    return _FORMS.get(form, _plain)(rng, form, varlen, sizes, tensors, options, fixed)


def spelled(tensors: dict[str, str]) -> dict[str, str]:
    """Replace ``heads`` by its two factors, which the shrinker can change on their own."""
    return {name: re.sub(r"\bheads\b", "group * heads_kv", text) for name, text in tensors.items()}


def _plain(rng, form, varlen, sizes, tensors, options, fixed, last="return_lse=True") -> Call:
    ours = "flashtile.attention"
    if form == "flash_attn_func":
        ours = rng.choice(["flashtile.flash_attn_func", "flash_attn_interface.flash_attn_func"])
        last = "return_attn_probs=True" if "interface" in ours else last
    elif (
        varlen
        and rng.random() < 0.3
        and not any(o.startswith(("mask", "bias", "seqused", *BEYOND_WINDOW)) for o in options)
    ):
        ours = "flashtile.flash_attn_varlen_func"
        options += ["invariant=True"] * (rng.random() < 0.3)
    if "interface" not in ours:
        last += "".join(
            f", {name}=True" for name in ("return_max_logits", "return_entropy") if rng.random() < 0.15
        )
    ours = in_surroundings(rng, ours, ("vmap",) if varlen else ())
    body = BODY.format(names="NAMES", positional="q, k, v", ours=ours, exact="oracle.attention", last=last)
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _packed_form(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    tokens = "total_q" if varlen else "batch, seqlen_q"
    keys = "total_k" if varlen else "batch, seqlen_k"
    if form == "qkvpacked":
        tensors = {"qkv": f"rand({tokens}, 3, heads_kv, head_dim, dtype=dtype, device=device)"}
        exact = "lambda qkv, **o: oracle.attention(*qkv.unbind(-3), **o)"
        if varlen:
            options[0] = _one_side(options[0])
            exact = (
                "lambda qkv, cu_seqlens, max_seqlen, **o: oracle.attention(*qkv.unbind(-3), cu_seqlens_q=cu_seqlens, "
                "cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, **o)"
            )
    else:
        tensors = {
            "q": tensors["q"],
            "kv": f"rand({keys}, 2, heads_kv, head_dim, dtype=dtype, device=device)",
        }
        exact = "lambda q, kv, **o: oracle.attention(q, *kv.unbind(-3), **o)"
    ours = f"flashtile.flash_attn_{'varlen_' * varlen}{form}_func"
    body = BODY.format(
        names="NAMES", positional=", ".join(tensors), ours=ours, exact=exact, last="return_lse=True"
    )
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _one_side(text: str) -> str:
    first, _, longest, _ = (
        text.replace("cu_seqlens_q=", "cu_seqlens=")
        .replace(", cu_seqlens_k", "\ncu_seqlens_k")
        .replace(", max_seqlen", "\nmax_seqlen")
        .split("\n")
    )
    return f"{first}, {longest.replace('max_seqlen_q', 'max_seqlen')}"


def _weights(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    """Attention weights, returned by the attention call and computed separately."""
    shape = "'full'" if varlen else rng.choice(["'full'", "'columns'", str(rng.randint(1, 5))])
    options = [o for o in options if not o.startswith(("sink", "qv", "deterministic"))]
    body = f"""def ours(*tensors, **options):
    out, lse, weights = flashtile.attention(*tensors, **options)
    alone = flashtile.attention_weights(*tensors[:2], lse, options.pop("return_attn_weights"), {{}})
    return out, lse, getattr(weights, "weights", weights), getattr(alone, "weights", alone)
def exact(*tensors, **options):
    out, lse, weights = oracle.attention(*tensors, **options)
    return out, lse, weights, weights
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, return_attn_weights={shape}, return_lse=True)
agree(call, ours, exact, gradients=False, GIVEN)""".replace(
        "{}", "**{name: x for name, x in options.items() if name not in ('return_lse',)}"
    )
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _merge(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    parts = rng.randint(2, 4)
    tensors = {}
    for n in range(parts):
        tensors[f"out_{n}"] = (
            f"rand(batch, seqlen_q, heads, head_dim_v, dtype=dtype, device=device, seed={n})"
        )
        kind = "torch.promote_types(dtype, torch.float32)"
        tensors[f"lse_{n}"] = (
            f"rand(batch, heads, seqlen_q, dtype={kind}, device=device, seed={n + 9}, scale=3.0)"
        )
    pairs = ", ".join(f"out_{n}, lse_{n}" for n in range(parts))
    body = f"""def exact(*parts):
    return oracle.merged(torch.stack(parts[::2]), torch.stack(parts[1::2]))
def call(merge, NAMES):
    return merge({pairs})
agree(call, flashtile.merge_states, exact, GIVEN)"""
    return Call(body, sizes, spelled(tensors), (), fixed)


def _tree(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    """Packed segments that continue each other, in any order, by the dense mask of their paths."""
    count = rng.randint(1, 6)
    order, parent = rng.sample(range(count), count), [-1] * count
    for n in range(1, count):
        parent[order[n]] = rng.choice([-1, *order[:n]])
    of_segments = lengths(rng, count, sizes["seqlen_q"])
    total = sum(of_segments) + rng.choice([0, 0, 2])
    options = [o for o in options if o.startswith(("softcap", "softmax_scale"))]
    window_left = rng.choice([-1, -1, rng.randint(0, 40)])
    body = f"""cu_seqlens, parent = offsets{_call(of_segments)}, ints{_call(parent)}
segment, above = torch.bucketize(torch.arange(total, device=device), cu_seqlens[1:], right=True), torch.eye({count + 1}, device=device).bool()
above[{count}] = False
for _ in range({count}):
    above[:{count}] |= above[parent] & (parent >= 0)[:, None]
place = torch.arange(total, device=device)
seen = above[segment][:, segment] & ((segment[:, None] != segment) | (place <= place[:, None]))
if {window_left} >= 0:
    depth = seen.sum(1)
    seen &= depth[:, None] - depth <= {window_left}
def ours(q, k, v, **options):
    return flashtile.tree_attention(q, k, v, cu_seqlens, parent, window_left={window_left}, **options)
def exact(q, k, v, **options):
    out, lse = oracle.attention(q[None], k[None], v[None], mask=seen[None, None], **options)
    return out[0], lse[0]
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, return_lse=True)
agree(call, ours, exact, GIVEN)"""
    tensors = {name: re.sub(r"batch, seqlen_[qk]", "total", text) for name, text in tensors.items()}
    return Call(body, sizes, spelled(tensors), tuple(options), fixed | {"total": str(total)})


def _dropout(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    """Attention with dropout. The dropout mask is read from a call whose values are the identity matrix."""
    share = rng.choice([0.125, 0.5])
    options = [o for o in options if not o.startswith(("qv", "seqused_q"))]
    body = f"""state = torch.tensor([{rng.randrange(2**62)}, {rng.randrange(2**62)}], device=device)
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, dropout_p={share}, rng_state=state, return_lse=True)
_eye = torch.eye(seqlen_k, max(seqlen_k, 1), dtype=dtype, device=device)[:, None].expand(batch, seqlen_k, heads_kv, -1)
with torch.no_grad():
    kept = flashtile.attention(q, k, _eye, dropout_p={share}, rng_state=state).transpose(1, 2) != 0
agree(call, flashtile.attention, lambda *t, **o: oracle.attention(*t, **o, kept=kept), GIVEN)"""
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _jvp(rng, form, varlen, sizes, tensors, options, fixed) -> Call:
    """Tangents of the results, along those of some of q, k and v, and the gradients of both."""
    given = rng.choice(["q", "k", "v", "qk", "kv", "qkv", "qkv"])
    more = "".join(f", {name}=True" for name in ("return_max_logits", "return_entropy") if rng.random() < 0.1)
    # torch has no tangents of negated and overlapping tensors, but of their copies.
    body = f"""def along(attend):
    def run(*tensors, **options):
        tensors = dict(zip("qkv", (t.clone() for t in tensors)))
        given = {{name: tensors[name] for name in {given!r}}}
        results, tangents = torch.func.jvp(
            lambda *moving: attend(*(tensors | dict(zip(given, moving))).values(), **options),
            tuple(given.values()), tuple(-t.flip(-1) for t in given.values()))
        return *results, *tangents
    return run
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, return_lse=True{more})
agree(call, along(flashtile.attention), along(oracle.attention), GIVEN)"""
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


_FORMS = {
    "jvp": _jvp,
    "kvpacked": _packed_form,
    "qkvpacked": _packed_form,
    "weights": _weights,
    "merge_states": _merge,
    "dropout": _dropout,
    "tree": _tree,
}
