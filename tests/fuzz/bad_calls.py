"""Family of bad calls: a good call of a public function with one wrong argument, which the error must name."""

from __future__ import annotations

import inspect
from random import Random

from flashtile.problems.masking import BEYOND_WINDOW
from fuzz import prelude
from fuzz.runner import Call

Q = "rand(2, 5, 4, 16)"
K, V = "rand(2, 7, 2, 16)", "rand(2, 7, 2, 16, seed=1)"
PACKED = {
    "cu_seqlens_q": "offsets(5, 5)", "cu_seqlens_k": "offsets(7, 7)", "max_seqlen_q": "5", "max_seqlen_k": "7",
}  # fmt: skip
MASKING = {"softmax_scale": "0.3", "causal": "True", "window_size": "(3, 1)", "softcap": "2.0"}
BY_POSITION = dict.fromkeys(BEYOND_WINDOW, "3")
EXTRAS = {"alibi_slopes": "rand(4)", "sink": "rand(4)"}
CACHE = {"q": "rand(2, 1, 4, 16)", "k_cache": "rand(6, 4, 2, 16)", "v_cache": "rand(6, 4, 2, 16)"}
TABLE = {"block_table": "ints([0, 1], [2, 3])", "cache_seqlens": "ints(5, 3)"}
ROTARY = {"rotary_cos": "rand(20, 8)", "rotary_sin": "rand(20, 8)", "rotary_interleaved": "True"}
HALF = {name: f"{text}.bfloat16()" for name, text in (("q", Q), ("k", K), ("v", V))}
LINEAR = {
    "x": "rand(3, 8)",
    "weight": "rand(6, 8)",
    "bias": "rand(6)",
    "norm_weight": "rand(8)",
    "norm_eps": "1e-6",
}

GOOD: dict[str, dict[str, str]] = {
    "flashtile.attention": {
        "q": Q, "k": K, "v": V, **MASKING, **EXTRAS, "dropout_p": "0.1", "rng_state": "torch.tensor([1, 2])",
        "mask": "torch.ones(2, 4, 5, 7).bool()", "key_padding_mask": "torch.ones(2, 7).bool()", "bias": "rand(1, 4, 5, 7)",
        **BY_POSITION, "deterministic": "False", "return_lse": "True", "seqused_q": "ints(3, 5)", "seqused_k": "ints(3, 5)",
    },
    "flashtile.attention ": {"q": Q, "k": K, "v": V, "score_mod": "masks.softcap(2.0)", "mask_mod": "masks.causal()"},
    "flashtile.attention  ": {
        "q": Q, "k": K, "v": V, "block_mask": "masks.create_block_mask(masks.causal(), None, None, 5, 7, device='cpu')",
        "return_attn_weights": "True",
    },
    "flashtile.flash_attn_func": {"q": Q, "k": K, "v": V, **MASKING, **EXTRAS, "return_attn_probs": "False"},
    "flashtile.flash_attn_varlen_func": {"q": f"{Q}.flatten(0, 1)", "k": f"{K}.flatten(0, 1)", "v": f"{V}.flatten(0, 1)", **PACKED, **MASKING},
    "flashtile.flash_attn_kvpacked_func": {"q": Q, "kv": "rand(2, 7, 2, 2, 16)", **MASKING},
    "flashtile.flash_attn_qkvpacked_func": {"qkv": "rand(2, 7, 3, 2, 16)", **MASKING},
    "flashtile.flash_attn_varlen_kvpacked_func": {"q": f"{Q}.flatten(0, 1)", "kv": "rand(14, 2, 2, 16)", **PACKED},
    "flashtile.flash_attn_varlen_qkvpacked_func": {"qkv": "rand(10, 3, 2, 16)", "cu_seqlens": "offsets(5, 5)", "max_seqlen": "5"},
    "flashtile.attention_weights": {"q": Q, "k": K, "lse": "rand(2, 4, 5)", "form": "'full'", **MASKING},
    "flashtile.flash_attn_with_kvcache": {
        **CACHE, **TABLE, **MASKING, **EXTRAS, "k": "rand(2, 1, 2, 16)", "v": "rand(2, 1, 2, 16)", **ROTARY, "rotary_seqlens": "ints(3, 5)",
        "num_splits": "2", "return_softmax_lse": "True", "softmax_max": "1.0", "debug_checks": "True", **BY_POSITION,
        "mass": "rand(6, 4, 2)",
    },
    "flashtile.append_kvcache": {
        "k_cache": CACHE["k_cache"], "v_cache": CACHE["v_cache"], "k": "rand(2, 1, 2, 16)", "v": "rand(2, 1, 2, 16)", **TABLE, **ROTARY,
    },
    "flashtile.copy_blocks": {"k_cache": CACHE["k_cache"], "v_cache": CACHE["v_cache"], "block_pairs": "ints([0, 1])", "debug_checks": "True"},
    "flashtile.flash_attn_combine": {"out_partial": "rand(3, 2, 5, 4, 16)", "lse_partial": "rand(3, 2, 5, 4)", "out_dtype": "torch.float32"},
    "flashtile.flash_attn_with_shared_prefix": {
        **CACHE, "block_table": "ints([0, 1], [0, 2])", "cache_seqlens": "ints(6, 7)", "prefix_seqlens": "4", "causal": "True",
        "softcap": "2.0", "softmax_scale": "0.3", "return_softmax_lse": "True", "num_splits": "2",
    },
    "flashtile.profile_scores": {"model_or_q": Q, "_k": K, "softmax_scale": "0.3", "causal": "True", "softcap": "1.0", "max_rows": "64"},
    "flashtile.merge_states": {"out_a": Q, "lse_a": "rand(2, 4, 5)", "out_b": Q, "lse_b": "rand(2, 4, 5)"},
    "flashtile.tree_attention": {
        "q": "rand(10, 4, 16)", "k": "rand(10, 2, 16)", "v": "rand(10, 2, 16, seed=1)", "cu_seqlens": "offsets(5, 3, 2)", "parent": "ints(-1, 0, 0)",
        "softmax_scale": "0.3", "softcap": "2.0", "sink": "rand(4)", "deterministic": "True", "return_lse": "True",
    },
    "flashtile.explain": {"q": Q, "k": K, "v": V, "causal": "True", "softcap": "1.0"},
    "flashtile.sdpa": {"fallback": "False", "backend": "'cpu'"},
    "flashtile.flex_attention": {
        "query": "rand(2, 4, 5, 16)", "key": "rand(2, 2, 7, 16)", "value": "rand(2, 2, 7, 16)", "score_mod": "masks.softcap(1.0)", "scale": "0.3",
        "enable_gqa": "True", "return_lse": "True", "kernel_options": "{}", "return_aux": "None",
    },
    "flashtile.fp8.attention": {**HALF, "method": "'head'", "hadamard": "True", "seed": "3", **MASKING, **EXTRAS, "return_lse": "True", "deterministic": "True"},
    "flashtile.fp8.quantize": {"x": HALF["k"], "role": "'k'", "method": "'block'", "hadamard": "True", "seed": "3", "seqused": "ints(3, 5)", "rotary_offset": "1", **ROTARY},
    "flashtile.fp8.quantize ": {"x": HALF["k"], "role": "'v'", "method": "'head'", "scale": "rand(2, 2).abs() + 0.01", "backend": "'cpu'"},
    "flashtile.linear.linear": {**LINEAR, "residual": "rand(3, 3)", "activation": "'silu_and_mul'", "prefetch": "True"},
    "flashtile.linear.linear_before_norm": {**LINEAR, "next_norm_weight": "rand(6)", "next_norm_eps": "1e-6"},
    "flashtile.linear.linear_qkv": {
        "x": "rand(3, 8)", "weight": "rand(96, 8)", "k_cache": "rand(4, 4, 1, 16)", "v_cache": "rand(4, 4, 1, 16)",
        "slot_mapping": "torch.tensor([0, 5, 9])", "positions": "ints(0, 1, 2)", **ROTARY, "norm_eps": "1e-6",
        "q_norm_weight": "rand(16)", "k_norm_weight": "rand(16)",
    },
    "flashtile.linear.explain": {"x": "rand(3, 8)", "weight": "rand(6, 8)"},
    "masks.causal": {"offset": "1"}, "masks.window": {"left": "1", "right": "2", "offset": "0"}, "masks.prefix_lm": {"length": "3", "offset": "0"},
    "masks.document": {"ids": "ints(0, 0, 1)", "ids_kv": "ints(0, 0, 1)"}, "masks.padding": {"lengths": "ints(2, 3)"},
    "masks.dilated": {"size": "2", "dilation": "2", "offset": "0"}, "masks.natten": {"height": "5", "width": "7", "kernel_size": "3"},
    "masks.alibi": {"slopes": "rand(4)", "offset": "0"}, "masks.relative_position": {"bias": "rand(4, 5)", "offset": "0"},
    "masks.softcap": {"cap": "1.0"}, "masks.mask_mod": {"function": "masks.causal()"}, "masks.score_mod": {"function": "masks.softcap(1.0)"},
    "masks.create_block_mask": {"mask_mod": "masks.causal()", "B": "2", "H": "4", "Q_LEN": "30", "KV_LEN": "40", "device": "'cpu'", "BLOCK_SIZE": "16"},
    "masks.create_tree_mask": {"cu_seqlens": "offsets(5, 3, 2)", "parent": "ints(-1, 0, 0)", "total": "10", "device": "'cpu'", "BLOCK_SIZE": "16"},
    "masks.from_triton": {"kind": "'score_mod'", "_function": "None"},
    "parallel.own_tokens": {"lengths": "ints(3, 5)", "rank": "0", "size": "2", "interleave": "1"},
    "kv_cache.BlockManager": {"num_blocks": "8", "block_size": "4", "max_sequences": "2", "max_seqlen": "16", "num_host_blocks": "2", "window_left": "3"},
    "kv_cache.PagedKVCache": {
        "num_layers": "1", "num_blocks": "8", "block_size": "4", "num_kv_heads": "2", "head_dim": "16", "max_sequences": "2", "max_seqlen": "16",
        "head_dim_v": "8", "dtype": "torch.float32", "device": "'cpu'", "num_host_blocks": "2", "window_left": "3",
    },
    "flashtile.SamplingParams": {
        "n": "1", "temperature": "0.5", "top_p": "0.9", "top_k": "4", "min_p": "0.1", "seed": "3", "max_tokens": "4", "min_tokens": "1",
        "presence_penalty": "0.5", "frequency_penalty": "0.5", "repetition_penalty": "1.5", "logprobs": "2", "stop": "'x'", "stop_token_ids": "[1]",
        "ignore_eos": "True", "detokenize": "True",
    },
    "engine.BeamSearchParams": {
        "beam_width": "2", "max_tokens": "4", "ignore_eos": "True", "temperature": "0.5", "length_penalty": "0.5", "stop_token_ids": "[1]",
        "include_stop_str_in_output": "True",
    },
    "flashtile.attention_weights ": {
        "q": f"{Q}.flatten(0, 1)", "k": f"{K}.flatten(0, 1)", "lse": "rand(4, 10)", "form": "3", **PACKED, **BY_POSITION,
    },
    "flashtile.attention_weights  ": {
        "q": Q, "k": K, "lse": "rand(2, 4, 5)", "form": "'columns'", "score_mod": "masks.softcap(2.0)", "mask_mod": "masks.causal()",
    },
    "flashtile.fp8.attention ": {
        "q": HALF["q"], "k": f"fp8.quantize({HALF['k']}, 'k', seed=3)", "v": HALF["v"], "method": "'block'", "hadamard": "True", "seed": "3", "rotary_cos": "rand(20, 8)",
        "rotary_sin": "rand(20, 8)", "rotary_interleaved": "True", "causal": "True",
    },
    "flashtile.fp8.attention  ": {
        **{name: f"{text}.flatten(0, 1)" for name, text in HALF.items()}, **PACKED, "seqused_k": "ints(3, 5)", **MASKING,
    },
    "flashtile.flash_attn_func ": {
        **{name: f"{text}.to(torch.float8_e4m3fn)" for name, text in (("q", Q), ("k", K), ("v", V))},
        **{f"{name}_descale": "rand(2, 2).abs()" for name in "qkv"}, "causal": "True",
    },
    "kv_cache.BlockPool": {"num_blocks": "8", "null_blocks": "1"},
    "manager().create": {"tokens": "[1, 2, 3]", "salt": "b'x'"},
    "manager().length": {"sequence": "0"}, "manager().fork": {"sequence": "0"}, "manager().free": {"sequence": "0"},
    "manager().fork_many": {"sequence": "0", "count": "2"},
    "manager().batch": {"sequences": "[0]"}, "manager().select": {"sequences": "[0]", "parents": "[0, 0]"},
    "manager().reserve": {"sequence": "0", "num_tokens": "2"}, "manager().truncate": {"sequence": "0", "length": "2"},
    "manager().cache_blocks": {"sequence": "0", "tokens": "range(5)", "salt": "b'x'"},
    "manager().swap_out": {"sequences": "[0]"}, "manager().swap_in": {"sequences": "[]"},
    "reserve_step": {"num_tokens": "[2]"},
    "kv_cache.PagedKVCache.block_bytes": {"num_layers": "1", "block_size": "4", "num_kv_heads": "2", "head_dim": "16", "head_dim_v": "8", "dtype": "torch.float32"},
    "parallel.Sharing": {
        "batch": "1", "seqlen": "64", "heads_q": "4", "heads_kv": "2", "head_dim": "16", "head_dim_v": "16", "dtype": "'float16'", "left": "3", "right": "0",
        "layout": "'striped'", "backward": "True",
    },
    "parallel.explain": {"sharing": "parallel.Sharing(1, 64, 4, 2, 16, 16)", "ranks": "2"},
    "padding.unpad": {"padded": "rand(2, 7, 2, 16)", "mask": "torch.ones(2, 7).bool()"},
    "padding.pad": {"tokens": "rand(3, 2, 16)", "indices": "torch.tensor([0, 3, 5])", "batch": "2", "seqlen": "7"},
    "bert_padding.unpad_input": {"hidden_states": "rand(2, 7, 2, 16)", "attention_mask": "torch.ones(2, 7).bool()", "unused_mask": "torch.zeros(2, 7).bool()"},
    "bert_padding.pad_input": {"hidden_states": "rand(3, 2, 16)", "indices": "torch.tensor([0, 3, 5])", "batch": "2", "seqlen": "7"},
    "bert_padding.index_first_axis": {"input": "rand(7, 2)", "indices": "torch.tensor([0, 3, 5])"},
    "bert_padding.index_put_first_axis": {"values": "rand(3, 2)", "indices": "torch.tensor([0, 3, 5])", "first_axis_dim": "9"},
    "bert_padding.unpad_input_for_concatenated_sequences": {"hidden_states": "rand(2, 7, 16)", "attention_mask_in_length": "torch.tensor([[3, 2, 0, 0, 0, 0, 0]] * 2)"},
    "rotary.apply_rotary_emb": {
        "x": Q, "cos": "rand(20, 8)", "sin": "rand(20, 8)", "interleaved": "True", "inplace": "True", "seqlen_offsets": "ints(3, 5)",
    },
    "rotary.apply_rotary_emb ": {
        "x": f"{Q}.flatten(0, 1)", "cos": "rand(20, 8)", "sin": "rand(20, 8)", "seqlen_offsets": "3", "cu_seqlens": "offsets(5, 5)",
    },
    "rotary.apply_rotary_emb_torch": {"x": Q, "cos": "rand(5, 8)", "sin": "rand(5, 8)", "interleaved": "True"},
    "rotary.apply_rotary_emb_qkv_": {
        "qkv": "rand(2, 7, 3, 2, 16)", "cos": "rand(20, 8)", "sin": "rand(20, 8)", "cos_k": "rand(20, 8)", "sin_k": "rand(20, 8)", "interleaved": "True",
        "seqlen_offsets": "3",
    },
    "rotary.apply_rotary_emb_kv_": {"kv": "rand(2, 7, 2, 2, 16)", "cos": "rand(20, 8)", "sin": "rand(20, 8)", "interleaved": "True", "seqlen_offsets": "3"},
    "flash_attn_interface.flash_attn_varlen_func": {
        "q": f"{Q}.flatten(0, 1)", "k": f"{K}.flatten(0, 1)", "v": f"{V}.flatten(0, 1)", **PACKED, **MASKING, "seqused_q": "ints(3, 5)", "seqused_k": "ints(3, 5)",
        "deterministic": "True",
    },
    "flash_attn_interface.flash_attn_qkvpacked_func": {"qkv": "rand(2, 7, 8, 16)", "num_heads_q": "4", "deterministic": "True", "return_attn_probs": "True"},
    "flash_attn_interface.flash_attn_func": {"q": Q, "k": K, "v": V, **MASKING, "attention_chunk": "3"},
    "flash_attn_interface.flash_attn_with_kvcache": {**CACHE, "page_table": TABLE["block_table"], "cache_seqlens": TABLE["cache_seqlens"], **MASKING, "attention_chunk": "3"},
    "nn.MultiheadAttention(8, 2, batch_first=True)": {
        "query": "rand(2, 5, 8)", "key": "rand(2, 5, 8)", "value": "rand(2, 5, 8)", "attn_mask": "torch.zeros(5, 5).bool()",
        "key_padding_mask": "torch.zeros(2, 5).bool()", "need_weights": "True", "average_attn_weights": "True", "is_causal": "False",
    },
}  # fmt: skip
"""Good arguments as texts, by function. Trailing spaces distinguish several calls of one function."""

NONSENSE = ("object()", "'nonsense'", "math.nan", "math.inf", "2**70", "-(2**70)", "-7", "b'x'", "[object()]", "{1: 2}", "1j", "(1, 2, 3, 4, 5)",
            "rand(2, 3, 4).numpy()", "torch.float32", "lambda x: x", "10**400", "None", "''", "[]", "'cuda:' + '9' * 30", "rand(2, 3, 4)", "True", "1.5")  # fmt: skip
SPOILT = ("({}).to('meta')", "sparse({})", "({}).to(torch.complex64)", "({})[None, None]", "({})[..., :0]", "({}).tolist()", "({}).to(torch.int8)",
          "({}).to(torch.float8_e5m2)", "({}).to(torch.float64)", "torch.cat([{}, {}], -1)",
          "({}).float().numpy()", "({})[:0]", "learning({})", "({})[..., ::2]", "nested({})", "scaled({}, -9)")  # fmt: skip

TAKEN: dict[str, tuple[str, ...]] = {
    "masks.window left": ("-7", "-(2**70)"), "masks.window right": ("-7", "-(2**70)"),  # a negative number is no limit
    "masks.causal offset": ("-7",), "masks.window offset": ("-7",), "masks.prefix_lm length": ("-7",), "masks.prefix_lm offset": ("-7",),
    "masks.dilated offset": ("-7",), "masks.alibi offset": ("-7",), "masks.relative_position offset": ("-7",),
    **{f"* {name}": ("-7", "2**70", "-(2**70)") for name in ("softmax_scale", "softmax_max", "scale")},  # any finite number
    **{f"* {name}": ("2**70", "math.inf") for name in ("softcap", "cap", "norm_eps", "next_norm_eps")},
    "masks.mask_mod function": ("lambda x: x",), "masks.score_mod function": ("lambda x: x",),
    "* window_left": ("-7",), "flashtile.SamplingParams stop": ("'nonsense'", "'cuda:' + '9' * 30"), "flashtile.SamplingParams top_k": ("-7",),
    "flashtile.SamplingParams seed": ("-7", "2**70", "-(2**70)"), "flashtile.SamplingParams max_tokens": ("2**70",), "flashtile.SamplingParams min_tokens": (),
    "flashtile.SamplingParams stop_token_ids": ("(1, 2, 3, 4, 5)",), "flashtile.SamplingParams top_p": (), "flashtile.SamplingParams logprobs": ("2**70",),
    "engine.BeamSearchParams length_penalty": ("-7",), "engine.BeamSearchParams stop_token_ids": ("(1, 2, 3, 4, 5)",),
    "* tokens": ("b'x'", "(1, 2, 3, 4, 5)", "{1: 2}", "({}).to(torch.complex64)", "({}).to(torch.float8_e5m2)"), "* num_tokens": ("{1: 2}",), "* sequences": ("{1: 2}",),
    **{f"* {name}": ("({}).to(torch.complex64)", "({}).to(torch.float8_e5m2)") for name in ("padded", "hidden_states", "values", "input")},  # moved, not computed with
    "* salt": ("b'x'",), 
    "* debug_checks": (), "* device": ("'meta'",), "flashtile.SamplingParams top_k ": ("2**70",),
    "* out_dtype": ("torch.float32",),
    "* dtype": ("torch.float32",),
    "masks.alibi slopes": ("({}).to(torch.float8_e5m2)",),
    "masks.relative_position bias": ("({}).to(torch.float8_e5m2)",),
    "masks.document ids": ("({})[None, None]", "({}).to(torch.float64)", "({}).to('meta')", "({}).to(torch.int8)", "torch.cat([{}, {}], -1)"),
}  # fmt: skip
"""Values that look like nonsense and are rightly taken, by function and argument (* for any function)."""

TAKEN_TENSORS = (
    "torch.cat([{}, {}], -1)",
    "({}).to(torch.int8)",
    "({}).to(torch.float64)",
    "({})[None, None]",
    "({})[..., :0]",
    "({}).to('meta')",
    "({})[:0]",
    "learning({})",
    "({})[..., ::2]",
    "scaled({}, -9)",
)
"""Of a tensor: what may be right for some argument, such as longer tables, other ints or one dimension more."""

MAY_BE_TAKEN = (*TAKEN_TENSORS, "None", "''", "[]", "rand(2, 3, 4)", "True", "1.5")
"""What is right for some arguments, and must end well for all."""


ALSO_NAMED = {
    "function": ("mask_mod", "score_mod"), "model_or_q": ("q", "k", "model"), "sequences": ("sequence",), "link": ("card",),
    "sequence": ("sequences",),
}  # fmt: skip
"""What an error may say instead of an argument's name."""


def _is_tensor(text: str) -> bool:
    return text.startswith(("rand(", "ints(", "offsets(", "torch.ones(", "torch.zeros(", "torch.tensor("))


def draw(rng: Random, device: str = "cpu", functions: tuple[str, ...] = ()) -> Call:
    name = rng.choice(functions or list(GOOD))
    arguments = GOOD[name]
    name = name.strip()
    victim = rng.choice([n for n in arguments if not n.startswith("_")])
    tensor = _is_tensor(arguments[victim])
    value = rng.choice(SPOILT if tensor and rng.random() < 0.5 else NONSENSE)
    taken = TAKEN.get(f"{name} {victim}", ()) + TAKEN.get(f"* {victim}", ())
    names = [victim, *ALSO_NAMED.get(victim, ())]
    # A value that this argument may accept must give a result or one of our errors.
    well = value in taken or value in MAY_BE_TAKEN
    if well or "{}" in value:  # an error may name what it does not fit
        names += [n for n in arguments if n != victim]
    check = f"{'ends_well' if well else 'refuses'}(lambda: CALL, {', '.join(map(repr, names))})"
    given = {**arguments, victim: value.replace("{}", arguments[victim])}
    order = [n for n in given if not n.startswith("_")]
    positional = [given[n] for n in given if n.startswith("_")]
    required = _required(name, arguments)
    options = tuple(f"{n}={given[n]}" for n in order if n != victim and n not in required)
    fixed = [f"{n}={given[n]}" for n in order if n == victim or n in required]
    if positional:  # positional arguments follow the first one
        fixed = [
            given[order[0]],
            *positional,
            *(text for text in fixed if not text.startswith(f"{order[0]}=")),
        ]
    call = f"{name}({', '.join(fixed)}, OPTIONS)"
    if not fixed:
        call = f"{name}(OPTIONS)"
    return Call(check.replace("CALL", call), {}, {}, options, {"_name": repr(f"{name} {victim}")})


def _required(name: str, arguments: dict[str, str]) -> set[str]:
    if name.endswith("explain"):  # it takes the arguments of the function that it explains
        return set(arguments)
    function = eval(name, vars(prelude).copy())
    parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    return {p.name for p in parameters if p.default is p.empty}


def key(call: Call, label: str) -> str:
    return f"{call.fixed['_name']}: {label}"
