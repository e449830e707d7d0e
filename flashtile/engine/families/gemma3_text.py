"""Gemma 3 of text: layers with a window have their own rotary base; queries and keys are normalised."""

from flashtile.engine.families.family import Family
from flashtile.engine.families.gemma2 import FIELDS, NORMS

FAMILY = Family(
    {
        **FIELDS, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
    },
    norms=NORMS, qk_norm="head", unit_norm=True, local_rope=True,
)  # fmt: skip
