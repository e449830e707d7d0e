"""Qwen3-MoE: Qwen 3 with experts, at least in some layers."""

from flashtile.engine.families.family import COMMON, Experts, Family

FAMILY = Family(
    {
        **COMMON, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    qk_norm="head", experts=Experts(inner="moe_intermediate_size"),
)  # fmt: skip
