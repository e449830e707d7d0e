"""Family of context-parallel calls on one to four ranks: every method and layout, windows, packed batches."""

from __future__ import annotations

from random import Random

from fuzz.attention import masking, qkv, sizes_for, spelled
from fuzz.runner import Call


def draw(rng: Random, device: str = "cpu") -> Call:
    sizes = sizes_for(rng, 60)
    size = rng.randint(1, 4)
    fixed = {"dtype": rng.choice(["torch.float64", "torch.float32", "torch.bfloat16"]), "device": "'cpu'"}
    if rng.random() < 0.25:
        return _decode(rng, sizes, fixed, size)
    method = rng.choice(["auto", "ring", "ulysses", "allgather"])
    if method == "ulysses":  # needs a multiple of the ranks as the number of key heads
        sizes["heads_kv"] = size * rng.randint(1, 2)
    options, tensors, varlen = masking(rng), qkv(rng, False, 1), rng.random() < 0.25
    if varlen:
        lengths = [rng.randint(0, 30) for _ in range(rng.randint(1, 4))]
        lengths[0] += 1
        tensors = qkv(rng, True, 1)
        fixed |= {"total_q": str(sum(lengths)), "total_k": str(sum(lengths))}
        cut = f"offsets({', '.join(map(str, lengths))})"
        options.append(
            f"cu_seqlens_q={cut}, cu_seqlens_k={cut}, max_seqlen_q={max(lengths)}, max_seqlen_k={max(lengths)}"
        )
    if rng.random() < 0.2:
        tensors["sink"] = "rand(heads, dtype=dtype, seed=22)"
        options.append("sink=sink")
    layout = rng.choice(["zigzag", "contiguous", "striped"])
    if not varlen and rng.random() < 0.2:  # any mask, of self-attention
        layout, method = rng.choice(["zigzag", "contiguous"]), rng.choice(["auto", "allgather"])
        options = [o for o in options if o.startswith(("softcap", "softmax_scale", "sink"))]
        options.append("mask=rand(1, 1, seqlen_q, seqlen_q, dtype=torch.float32, seed=31) > 0.4")
        tensors = {name: text.replace("seqlen_k", "seqlen_q") for name, text in tensors.items()}
    body = f"""from fuzz.ranks import on_ranks
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, return_lse=True)
agree(call, on_ranks({size}, {layout!r}, {method!r}), oracle.attention, again=False, GIVEN)"""
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)


def _decode(rng: Random, sizes: dict[str, int], fixed: dict[str, str], size: int) -> Call:
    sizes["heads_kv"], merge = 2, rng.choice(["allgather", "reduce_scatter"])
    if merge == "reduce_scatter":
        sizes["group"] = size
    sizes["seqlen_q"] = rng.randint(1, 3)
    lengths = [rng.randint(sizes["seqlen_q"], 40) for _ in range(sizes["batch"])]
    fixed["batch"] = str(sizes.pop("batch"))
    tensors = {
        "q": "rand(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=1)",
        "k_cache": "rand(batch, 40, heads_kv, head_dim, dtype=dtype, seed=2)",
        "v_cache": "rand(batch, 40, heads_kv, head_dim_v, dtype=dtype, seed=3)",
    }
    options = [o for o in masking(rng) if not o.startswith(("window", "causal"))]
    if rng.random() < 0.3:
        tensors["_sink"] = "rand(heads, dtype=dtype, seed=7)"
        options.append("sink=_sink")
    ours = f"decode_on_ranks({size}, {rng.choice([1, 1, 3])}, {merge!r})"
    body = f"""from fuzz.ranks import decode_on_ranks
def call(attend, NAMES):
    return attend(q, k_cache, v_cache, cache_seqlens=ints({", ".join(map(str, lengths))}), causal=True, OPTIONS, return_softmax_lse=True)
agree(call, {ours}, oracle.with_kvcache, gradients=False, again=False, GIVEN)"""
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)
