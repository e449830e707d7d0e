"""Family of linear layers, with fused norm, activation, residual and scales."""

from __future__ import annotations

from random import Random

from fuzz.attention import dtype_for, in_surroundings, laid_out
from fuzz.runner import Call


def options_for(rng: Random, columns: str, residual: bool = True) -> tuple[dict[str, str], list[str]]:
    """Draw optional tensors of the linear functions: return (tensors, options that pass them)."""
    tensors, options = {}, []
    if rng.random() < 0.4:
        tensors["bias"] = f"rand({columns}, dtype=dtype, device=device, seed=3)"
        options.append("bias=bias")
    if rng.random() < 0.4:
        tensors["norm_weight"] = "rand(inner, dtype=dtype, device=device, seed=4)"
        options.append(f"norm_weight=norm_weight, norm_eps={rng.choice([1e-6, 0.1])}")
    elif rng.random() < 0.2:
        tensors["_x_scale"] = "rand(rows, device=device, seed=5).abs()"
        options.append("x_scale=_x_scale")
    if residual and rng.random() < 0.3:
        tensors["residual"] = "rand(*_shape[:-1], {}, dtype=dtype, device=device, seed=6)"
        options.append("residual=residual")
    if rng.random() < 0.2:
        options.append("prefetch=True")
    if residual and rng.random() < 0.2:  # linear_qkv does not have it
        options.append("invariant=True")
    return tensors, options


def weight(rng: Random, rows: str, narrow: bool, tensors: dict[str, str], options: list[str]) -> None:
    if narrow and rng.random() < 0.4:
        tensors["weight"] = f"rand({rows}, inner, device=device, seed=2).to(torch.float8_e4m3fn)"
        blocks = rng.random() < 0.5
        scale = f"-(-({rows}) // 128), -(-inner // 128)" if blocks else rows
        tensors["_weight_scale"] = f"rand({scale}, device=device, seed=7).abs()"
        options.append("weight_scale=_weight_scale")
    else:
        tensors["weight"] = f"rand({rows}, inner, dtype=dtype, device=device, seed=2)"


def draw(rng: Random, device: str = "cpu") -> Call:
    form = rng.choice(["linear"] * 3 + ["linear_before_norm", "linear_qkv"])
    sizes = {"inner": rng.choice([1, 8, 33, 64, 128, 200]), "outer": rng.choice([1, 4, 16, 65, 150])}
    rows = rng.choice([0, 1, 2, 3, 5, 17])
    leading = rng.choice(
        [f"({rows}, inner)", f"({rows}, 1, inner)", "(inner,)"] if form == "linear" else [f"({rows}, inner)"]
    )
    rows = 1 if leading == "(inner,)" else rows
    fixed = {"dtype": dtype_for(rng, device), "device": repr(device), "rows": str(rows)}
    gated = form == "linear" and rng.random() < 0.3
    columns = {"linear_qkv": "6 * dim"}.get(form, "2 * outer" if gated else "outer")
    if form == "linear_qkv":
        sizes |= {"dim": rng.choice([2, 8, 16])}
    tensors, options = options_for(rng, columns, form != "linear_qkv")
    tensors = {"_shape": leading, "x": laid_out(rng, "*_shape", 1, ("contiguous", "offset", "negated"))} | {
        name: text.format("outer") for name, text in tensors.items()
    }
    weight(rng, columns, fixed["dtype"] in ("torch.float16", "torch.bfloat16"), tensors, options)
    if form == "linear":
        options += ["activation='silu_and_mul'"] if gated else []
        ours = in_surroundings(rng, "flashtile.linear.linear", ("vmap",))
        body = f"def call(linear, NAMES):\n    return linear(x, weight, OPTIONS)\nagree(call, {ours}, "
        return Call(body + "oracle.linear, gradients=False, GIVEN)", sizes, tensors, tuple(options), fixed)
    if form == "linear_before_norm":
        tensors["after"] = "rand(outer, dtype=dtype, device=device, seed=8)"
        body = """def exact(x, weight, after, next_norm_eps=1e-6, **options):
    y = oracle.linear(x, weight, **options)
    factor = torch.rsqrt(y.square().mean(-1) + next_norm_eps).flatten()
    return y, oracle.narrow(y * after), factor
def call(linear, NAMES):
    return tuple(linear(x, weight, after, OPTIONS))
agree(call, flashtile.linear.linear_before_norm, exact, gradients=False, GIVEN)"""
        return Call(body, sizes, tensors, tuple(options), fixed)
    return _qkv(rng, sizes, tensors, options, fixed, rows)


def _qkv(rng, sizes, tensors, options, fixed, rows) -> Call:
    """The fused q, k and v projection, with four query heads, one key head and one value head."""
    fixed["heads"] = "4"
    slots = [s if rng.random() < 0.8 else -1 for s in rng.sample(range(32), rows)]
    cache = "rand(8, 4, 1, dim, dtype=dtype, device=device, seed={})"
    tensors |= {"k_cache": cache.format(11), "v_cache": cache.format(12)}
    half = sizes["dim"] // 2
    positions = [rng.randint(0, 90) for _ in range(rows)]
    if rng.random() < 0.5:
        tensors["_angles"] = (
            f"torch.arange(100.0, device=device)[:, None] * 0.7 ** torch.arange({half}, device=device)"
        )
        options.append(
            f"rotary_cos=_angles.cos().to(dtype), rotary_sin=_angles.sin().to(dtype), rotary_interleaved={rng.random() < 0.5}, "
            f"positions=ints({', '.join(map(str, positions))}{', ' * (rows > 0)}device=device)"
        )
    if sizes["dim"] == 16 and rng.random() < 0.5:
        for i, name in enumerate("qk"):
            tensors[f"_{name}_norm"] = f"rand(dim, dtype=dtype, device=device, seed={13 + i})"
            options.append(f"{name}_norm_weight=_{name}_norm")
    body = f"""slots = torch.tensor({slots}, device=device, dtype=torch.int64)
def exact(x, weight, k_cache, v_cache, slot_mapping, rotary_cos=None, rotary_sin=None, positions=None, rotary_interleaved=False,
          q_norm_weight=None, k_norm_weight=None, **options):
    q, k, v = oracle.linear(x, weight, **options).unflatten(-1, (6, -1)).split([4, 1, 1], 1)
    if q_norm_weight is not None:
        q, k = (oracle.rms(t, w, options.get("norm_eps", 1e-6)) for t, w in ((q, q_norm_weight), (k, k_norm_weight)))
    if rotary_cos is not None:
        q, k = (oracle.rotated(t, rotary_cos, rotary_sin, positions.long(), rotary_interleaved) for t in (q, k))
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(32, 1, -1)[slots[slots >= 0]] = new[slots >= 0]
    return q
def call(linear, NAMES):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    q = linear(x, weight, k_cache, v_cache, slot_mapping=slots, OPTIONS)
    return q, k_cache, v_cache
agree(call, flashtile.linear.linear_qkv, exact, gradients=False, GIVEN)"""
    return Call(body, sizes, tensors, tuple(options), fixed)
