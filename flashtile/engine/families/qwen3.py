"""Qwen 3: queries and keys are normalised per head."""

from flashtile.engine.families.family import Family
from flashtile.engine.families.qwen2 import FIELDS

FAMILY = Family({**FIELDS, "head_dim": 128, "attention_bias": False}, qk_norm="head")
