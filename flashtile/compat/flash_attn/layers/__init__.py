"""FlashAttention-2's layers. Only rotary embedding is provided."""
