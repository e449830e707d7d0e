"""Qwen 2 and 2.5: biases of queries, keys and values, and a window in later layers."""

from flashtile.engine.families.family import COMMON, Family

FIELDS = {
    **COMMON, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
FAMILY = Family(FIELDS, qkv_bias=True, o_bias=False)
