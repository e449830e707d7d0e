"""FlashAttention-2's layers, of which there is rotary embedding."""
