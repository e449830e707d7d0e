"""Gemma 2: soft caps, norms after attention and MLP, and a window in every other layer."""

from flashtile.engine.families.family import COMMON, Family

FIELDS = {
    **COMMON, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
FAMILY = Family(
    {
        **FIELDS, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    norms=NORMS, unit_norm=True, full_every=2,
)  # fmt: skip
