"""Family of FP8 attention calls, compared with exact attention; errors are measured in rounding units of e4m3."""

from __future__ import annotations

from random import Random

from fuzz.attention import in_surroundings, masking, packed, qkv, sizes_for, spelled
from fuzz.runner import Call


def draw(rng: Random, device: str = "cpu") -> Call:
    sizes = sizes_for(rng, 200)
    sizes["head_dim"], sizes["head_dim_v"] = rng.choice([16, 32, 64, 20]), rng.choice([16, 32, 64])
    fixed = {"dtype": rng.choice(["torch.bfloat16", "torch.float16"]), "device": repr(device)}
    varlen = rng.random() < 0.3
    tensors, options = qkv(rng, varlen, 3), masking(rng)
    options = [o for o in options if "softmax_scale=3.0" not in o]
    if varlen:
        cut, totals = packed(rng, sizes)
        options, fixed = cut + options, fixed | totals
    method = rng.choice(["block", "head", "tensor"])
    form = rng.choice(["attention", "attention", "quantize", "descales"])
    if rng.random() < 0.3:
        tensors["_slopes"] = "rand(heads, device=device, seed=21).abs()"
        options.append("alibi_slopes=_slopes")
    if rng.random() < 0.3:
        tensors["_sink"] = "rand(heads, device=device, seed=22)"
        options.append("sink=_sink")
    if rng.random() < 0.2:
        options.append("deterministic=True")
    more = f"method={method!r}, hadamard={rng.random() < 0.5}, seed={rng.randrange(99)}"
    last = "scores_at=torch.float8_e4m3fn, gradients=False, GIVEN)"
    if form == "attention":
        body = f"""def exact(*tensors, method, hadamard, seed, **options):
    return oracle.attention(*(oracle.narrow(t) for t in tensors), **options)
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, {more}, return_lse=True)
agree(call, {in_surroundings(rng, "flashtile.fp8.attention", ("vmap",))}, exact, {last}"""
    elif form == "quantize":  # compares the dequantised tensor
        role = rng.choice("qkv")
        options, tensors = [], {"x": tensors["v" if role == "v" else "k"]}
        where = "" if not varlen else ", cu_seqlens=offsets(total_k, device=device), max_seqlen=total_k"
        body = f"""def ours(x):
    found = flashtile.fp8.quantize(x, {role!r}, method={method!r}, hadamard={rng.random() < 0.5}, seed=5{where})
    return found.dequantize()
def call(quantize, x):
    return quantize(x)
agree(call, ours, oracle.narrow, {last}"""
    else:
        tensors = {
            name: f"({t}).to(torch.float8_e4m3fn)" if name in "qkv" else t for name, t in tensors.items()
        }
        tensors["_scales"] = "rand(3, batch, heads_kv, device=device, seed=9).abs()"
        options = [o for o in options if not o.startswith(("alibi", "sink"))]
        body = f"""def exact(q, k, v, q_descale, k_descale, v_descale, **options):
    q, k, v = (t * s.repeat_interleave(t.shape[2] // heads_kv, 1)[:, None, :, None].to(t) for t, s in ((q, q_descale), (k, k_descale), (v, v_descale)))
    return oracle.attention(*(oracle.narrow(t) for t in (q, k, v)), **options)
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, q_descale=_scales[0], k_descale=_scales[1], v_descale=_scales[2], return_lse=True)
agree(call, {in_surroundings(rng, "flashtile.attention", ("vmap",))}, exact, {last}"""
        if varlen:
            return draw(rng, device)
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)
