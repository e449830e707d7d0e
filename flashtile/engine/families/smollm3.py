"""SmolLM 3: every fourth layer has no rotary embedding."""

from flashtile.engine.families.family import COMMON, Family

FAMILY = Family(
    {
        **COMMON, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rope_theta": 2000000.0,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "eos_token_id": 128001, "bos_token_id": 128000,
    }
)  # fmt: skip
