"""Llama 2 and 3, from which the other families differ."""

from flashtile.engine.families.family import COMMON, Family

FAMILY = Family({**COMMON, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2, "bos_token_id": 1})
