"""Family of calls of the integrations: SDPA, MultiheadAttention, padding, rotary embedding, Transformers."""

from __future__ import annotations

from random import Random

from fuzz.attention import dtype_for, in_surroundings, laid_out, sizes_for, spelled
from fuzz.runner import Call


def _heads_first(rng: Random) -> dict[str, str]:
    return {
        "q": laid_out(rng, "batch, heads, seqlen_q, head_dim", 1),
        "k": laid_out(rng, "batch, heads_kv, seqlen_k, head_dim", 2),
        "v": laid_out(rng, "batch, heads_kv, seqlen_k, head_dim_v", 3),
    }


PATTERNS = (
    "rand(batch, 1, 1, seqlen_k, seed=5, device=device) > -0.5", "rand(1, 1, seqlen_q, seqlen_k, seed=5, device=device) > 0",
    "rand(seqlen_q, seqlen_k, seed=5, device=device) > 0", "torch.ones(seqlen_q, seqlen_k, device=device).tril().bool()",
    "rand(heads, 1, seqlen_k, seed=5, device=device) > 0",
    "(torch.arange(seqlen_k, device=device) < 1 + torch.arange(batch, device=device)[:, None])[:, None, None]",
    "(torch.arange(seqlen_k, device=device) >= torch.arange(batch, device=device)[:, None])[:, None, None]",
)  # fmt: skip


def _sdpa(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    tensors, options = _heads_first(rng), []
    kind = rng.random()
    if kind < 0.25:
        options.append("is_causal=True")
    elif kind < 0.6:
        tensors["_mask"] = rng.choice(PATTERNS)
        options.append("attn_mask=_mask")
    elif kind < 0.75:
        tensors["attn_mask"] = (
            f"rand({rng.choice(['batch, heads', 'batch, 1', '1, heads'])}, seqlen_q, seqlen_k, dtype=dtype, device=device, seed=6)"
        )
        options.append("attn_mask=attn_mask")
    if rng.random() < 0.3:
        options.append("scale=0.3")
    body = """def ours(*tensors, **options):
    with flashtile.sdpa(fallback=False):
        return F.scaled_dot_product_attention(*tensors, **options)
def call(sdpa, NAMES):
    return sdpa(q, k, v, OPTIONS, enable_gqa=True)
agree(call, OURS, oracle.sdpa, GIVEN)""".replace("OURS", in_surroundings(rng, "ours"))
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _refilled(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    """A mask whose values change between two calls, by each way to change a tensor."""
    ways = [
        "mask.data.copy_(then)",
        "mask.copy_(then)",
        "mask.untyped_storage().copy_(then.untyped_storage())",
    ]
    write = rng.choice(ways + ["_buffer[...] = then.numpy()"] * (fixed["device"] == "'cpu'"))
    first, then = rng.sample(PATTERNS[2:4], 2)
    body = f"""then = ({then}).expand(seqlen_q, seqlen_k).clone()
first = ({first}).expand(seqlen_q, seqlen_k).clone()
_buffer = first.cpu().numpy().copy()
mask = torch.from_numpy(_buffer) if device == "cpu" else first.clone()
door = flashtile.sdpa(fallback=False)
def ours(*tensors, attn_mask):
    with door:
        mask.copy_(first)
        F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
        {write}
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
def call(sdpa, NAMES):
    return sdpa(q, k, v, attn_mask=then)
agree(call, ours, oracle.sdpa, GIVEN)"""
    return Call(body, sizes, spelled(_heads_first(rng)), (), fixed)


def _multihead(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    fixed["dtype"] = rng.choice(
        ["torch.float32", "torch.float64"] if fixed["device"] == "'cpu'" else ["torch.float32"]
    )
    made = [f"bias={rng.random() < 0.7}", f"batch_first={(first := rng.random() < 0.5)}"]
    made += [f"{name}=True" for name in ("add_bias_kv", "add_zero_attn") if rng.random() < 0.15]
    if rng.random() < 0.2:
        made.append("kdim=6, vdim=10")
    of_k, of_v = ("6", "10") if "kdim" in made[-1] else ("heads_kv * 8", "heads_kv * 8")
    text = "rand({}, {}, {}, dtype=dtype, device=device, seed={})"

    def side(length: str, width: str, seed: int) -> str:
        return text.format(*(("batch", length) if first else (length, "batch")), width, seed)

    tensors = {
        "query": side("seqlen_q", "heads_kv * 8", 1), "key": side("seqlen_k", of_k, 2), "value": side("seqlen_k", of_v, 3)
    }  # fmt: skip
    options = [
        rng.choice(
            ["need_weights=False", "need_weights=False", "average_attn_weights=False", "need_weights=True"]
        )
    ]
    if rng.random() < 0.3:
        tensors["_padding"] = (
            "torch.arange(seqlen_k, device=device) > torch.arange(batch, device=device)[:, None]"
        )
        options.append("key_padding_mask=_padding")
    elif rng.random() < 0.3:
        tensors["_mask"] = (
            "torch.arange(seqlen_k, device=device) > torch.arange(seqlen_q, device=device)[:, None]"
        )
        options.append("attn_mask=_mask")
    elif rng.random() < 0.2:
        tensors["attn_mask"] = (
            "rand(batch * heads_kv, seqlen_q, seqlen_k, dtype=dtype, device=device, seed=6)"
        )
        options.append("attn_mask=attn_mask")
    body = f"""torch.manual_seed(0)
theirs = torch.nn.MultiheadAttention(heads_kv * 8, heads_kv, {", ".join(made)}, device=device, dtype=dtype)
made = flashtile.nn.MultiheadAttention(heads_kv * 8, heads_kv, {", ".join(made)}, device=device, dtype=dtype)
made.load_state_dict(theirs.state_dict())
def ours(*tensors, **options):
    out, weights = made(*tensors, **options)
    return out if weights is None else (out, weights)
def call(attend, NAMES):
    return attend(query, key, value, OPTIONS)
agree(call, ours, lambda *t, **o: oracle.multihead(theirs, *t, **o), GIVEN)"""
    return Call(body, sizes, tensors, tuple(options), fixed)


def _padding(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    body = """there = rand(batch, seqlen_k, device=device, seed=9) > 0
def ours(x):
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, there)
    again = bert_padding.index_first_axis(x.flatten(0, 1), indices)
    both = bert_padding.index_put_first_axis(again, indices, batch * seqlen_k)
    kept = bert_padding.index_first_axis_residual(tokens, torch.arange(len(tokens), device=device))[0]
    assert used.tolist() == there.sum(1).tolist() and longest == max(there.sum(1).tolist(), default=0)
    return bert_padding.pad_input(kept, indices, batch, seqlen_k), both
def exact(x):
    x = x * there[..., None, None]
    return x, x.flatten(0, 1)
def call(pad, NAMES):
    return pad(x)
agree(call, ours, exact, GIVEN)"""
    tensors = {"x": "rand(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, device=device)"}
    return Call(body, sizes, tensors, (), fixed)


def _rotary(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    sizes["head_dim"] = rng.choice([8, 16, 20])
    half, start, name = (
        rng.randint(1, 4),
        rng.randint(0, 9),
        rng.choice(["apply_rotary_emb", "apply_rotary_emb_torch"]),
    )
    interleaved = rng.random() < 0.5
    offset = f", seqlen_offsets={start}" if name == "apply_rotary_emb" else ""
    body = f"""angles = torch.arange(200.0, dtype=torch.float64, device=device)[:, None] * 0.7 ** torch.arange({half}, device=device)
def ours(x):
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    rows = slice(None) if {bool(offset)} else slice(seqlen_k)
    return rotary.{name}(x, cos[rows], sin[rows], interleaved={interleaved}{offset})
def exact(x):
    cos, sin = angles.cos().to(dtype).to(x.dtype), angles.sin().to(dtype).to(x.dtype)
    at = torch.arange(seqlen_k, device=device) + {start if offset else 0}
    return torch.stack([oracle.rotated(row, cos, sin, at, {interleaved}) for row in x]) if len(x) else x
def call(rotate, NAMES):
    return rotate(x)
agree(call, ours, exact, GIVEN)"""
    tensors = {"x": "rand(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, device=device)"}
    return Call(body, sizes, tensors, (), fixed)


MODELS = {
    "llama": (), "mistral": ("sliding_window=5",), "qwen2": ("use_sliding_window=True", "sliding_window=5", "max_window_layers=1"),
    "gemma2": ("sliding_window=4", "query_pre_attn_scalar=16"), "gpt_oss": ("sliding_window=4", "num_local_experts=2", "num_experts_per_tok=1"),
    "bert": (), "modernbert": ("local_attention=6", "global_attn_every_n_layers=2"),
}  # fmt: skip


def _transformers(rng: Random, sizes: dict[str, int], fixed: dict[str, str]) -> Call:
    """A tiny model with ``attn_implementation="flashtile"``, compared with eager at all tokens but padding."""
    name = rng.choice(list(MODELS))
    there = rng.choice(["right", "left", "holes", "all"])
    rows, length = rng.randint(1, 3), rng.randint(8, 24)
    body = f"""from fuzz.models import eager_differs
eager_differs({name!r}, rows={rows}, length={length}, padding={there!r}, seed={rng.randrange(99)}, OPTIONS)"""
    return Call(body, {}, {}, MODELS[name], fixed)


def draw(rng: Random, device: str = "cpu") -> Call:
    sizes = sizes_for(rng, 40)
    fixed = {"dtype": dtype_for(rng, device), "device": repr(device)}
    made = rng.choice(
        [
            _sdpa,
            _sdpa,
            _sdpa,
            _refilled,
            _multihead,
            _multihead,
            _padding,
            _rotary,
            _transformers,
            _transformers,
        ]
    )
    return made(rng, sizes, fixed)
