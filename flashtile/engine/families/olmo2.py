"""OLMo 2: norms only after attention and MLP; queries and keys are normalised over all heads."""

from flashtile.engine.families.family import COMMON, Family

FAMILY = Family(
    {
        **COMMON, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False, "eos_token_id": 50279,
    },
    norms=(None, "post_attention", None, "post_feedforward"), qk_norm="all",
)  # fmt: skip
