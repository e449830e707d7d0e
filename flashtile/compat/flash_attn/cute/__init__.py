"""``flash_attn.cute``: FlashAttention-4's package, with its two public functions."""

from flashtile.compat.flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
