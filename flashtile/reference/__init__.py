"""Standard attention and related functions in plain PyTorch, with which tests compare results."""

from flashtile.reference import attention, decode

__all__ = ["attention", "decode"]
