"""Family of engine runs compared with Transformers: tiny checkpoints whose config.json leaves fields out."""

from __future__ import annotations

from random import Random

from fuzz.runner import Call

ROPE = (
    "{'rope_type': 'default', 'rope_theta': 1000.0}",
    "{'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 2.0}",
    "{'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, "
    "'original_max_position_embeddings': 32}",
    "{'rope_type': 'yarn', 'rope_theta': 1000.0, 'factor': 4.0, 'original_max_position_embeddings': 32}",
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
