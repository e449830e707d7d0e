"""gpt-oss: attention sinks, a window in every other layer, YaRN, and experts."""

from flashtile.engine.families.family import COMMON, Experts, Family

ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILY = Family(
    {
        **COMMON, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
        "rope_theta": 150000.0, "rope_parameters": ROPE, "sliding_window": 128, "layer_types": None,
        "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    full_every=2, sinks=True, experts=Experts(router="router", stacked=True),
)  # fmt: skip
