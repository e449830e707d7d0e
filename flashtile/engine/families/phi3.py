"""Phi-3 and Phi-4-mini: joined projections and LongRoPE, which may rotate a part of each head."""

from flashtile.engine.families.family import COMMON, Family

FAMILY = Family(
    {
        **COMMON, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0, "sliding_window": None, "eos_token_id": 32000, "bos_token_id": 1,
    },
    qkv=("qkv_proj",), gate_up=("gate_up_proj",), rope_types={"su": "longrope", "yarn": "longrope"},
)  # fmt: skip
