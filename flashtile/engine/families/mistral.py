"""Mistral: a sliding window in every layer."""

from flashtile.engine.families.family import COMMON, Family

FIELDS = {
    **COMMON, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
FAMILY = Family({**FIELDS, "layer_types": None})
