"""Family of engine runs compared with Transformers: tiny checkpoints whose config.json leaves fields out."""

from __future__ import annotations

from random import Random

from fuzz.runner import Call

ROPE = (
    "{'rope_type': 'default', 'rope_theta': 1000.0}",
    "{'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 2.0}",
    "{'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, "
    "'original_max_position_embeddings': 32}",
    "{'rope_type': 'dynamic', 'rope_theta': 1000.0, 'factor': 4.0}",
    "{'rope_type': 'yarn', 'rope_theta': 1000.0, 'factor': 4.0, 'original_max_position_embeddings': 32}",
)
LONGROPE = "{'rope_type': 'longrope', 'rope_theta': 1000.0, 'short_factor': [1.0, 1.2, 1.5, 2.0], 'long_factor': [1.0, 2.0, 4.0, 8.0]}"
NESTED_ROPE = (
    "{'full_attention': {'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 2.0}}",
    "{'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0}}",
)
COMMON = {
    "rms_norm_eps": ("1e-6", "0.01"), "max_position_embeddings": ("64",), "rope_parameters": ROPE,
    "tie_word_embeddings": ("True", "False"),
}  # fmt: skip
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"attention_bias": ("True", "False"), "mlp_bias": ("True",), "num_key_value_heads": ("1", "4"), "head_dim": ("16",),
              "hidden_act": ("'silu'", "'gelu_pytorch_tanh'")},
    "mistral": {"sliding_window": ("5", "None", "30"), "head_dim": ("16",)},
    "qwen2": {"use_sliding_window": ("True", "False"), "sliding_window": ("6",), "max_window_layers": ("0", "1")},
    "qwen3": {"attention_bias": ("True",), "use_sliding_window": ("True",), "sliding_window": ("6",), "max_window_layers": ("0", "1"),
              "head_dim": ("8",)},
    "gemma2": {"sliding_window": ("4",), "query_pre_attn_scalar": ("16", "20"), "attn_logit_softcapping": ("2.0", "None"),
               "final_logit_softcapping": ("3.0", "None"), "hidden_activation": ("'gelu_pytorch_tanh'",), "head_dim": ("8",)},
    "gemma3_text": {"sliding_window": ("4",), "query_pre_attn_scalar": ("16", "20"), "final_logit_softcapping": ("3.0", "None"),
                    "layer_types": ("['full_attention', 'sliding_attention']",), "hidden_activation": ("'gelu_pytorch_tanh'",),
                    "head_dim": ("8",), "rope_parameters": NESTED_ROPE},
    "olmo2": {"attention_bias": ("True",), "num_key_value_heads": ("1", "4")},
    "smollm3": {"attention_bias": ("True",), "mlp_bias": ("True",), "use_sliding_window": ("True", "False"), "sliding_window": ("6", "None"),
                "no_rope_layers": ("[1, 0]", "[0, 0]", "[1, 1]"), "no_rope_layer_interval": ("1", "2")},
    "phi3": {"sliding_window": ("5", "None", "30"), "num_key_value_heads": ("1", "4"), "rope_parameters": (ROPE[0], LONGROPE),
             "original_max_position_embeddings": ("64",)},
    "mixtral": {"sliding_window": ("5", "None"), "head_dim": ("16",), "num_local_experts": ("2", "4"), "num_experts_per_tok": ("1", "2"),
                "rope_parameters": ROPE[:3]},  # with a head_dim of null, Transformers' dynamic and yarn fail
    "qwen3_moe": {"attention_bias": ("True",), "use_sliding_window": ("True",), "sliding_window": ("6",), "num_experts": ("8", "12"),
                  "num_experts_per_tok": ("1", "3"), "moe_intermediate_size": ("24",), "norm_topk_prob": ("True", "False"),
                  "decoder_sparse_step": ("1", "2"), "mlp_only_layers": ("[0]", "[1]")},
    "gpt_oss": {"sliding_window": ("4",), "num_local_experts": ("4",), "num_experts_per_tok": ("1", "2"), "attention_bias": ("True",),
                "layer_types": ("['full_attention', 'sliding_attention']",)},
}  # fmt: skip
"""Fields of config.json by model family, with their possible values; each field may be left out."""


def draw(rng: Random, device: str = "cpu") -> Call:
    name = rng.choice(list(FIELDS))
    options = []
    for field, values in {**COMMON, **FIELDS[name]}.items():
        if rng.random() < 0.35:
            options.append(f"{field}=LEFT_OUT")
        elif rng.random() < 0.6:
            options.append(f"{field}={rng.choice(values)}")
    prompt = [rng.randrange(90) for _ in range(rng.choice([2, 9, 40]))]
    body = f"""from fuzz.models import LEFT_OUT, engine_differs
engine_differs({name!r}, {prompt}, OPTIONS)"""
    return Call(body, {}, {}, tuple(options), {})


def key(call: Call, label: str) -> str:
    """Return the key under which a failure is reported once: by field, because their messages are the same."""
    return f"{label} {sorted(o for o in call.options if 'LEFT_OUT' in o)[:1]}"
