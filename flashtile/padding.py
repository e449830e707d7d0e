"""Packing of padded batches; the module is :mod:`flashtile.api.padding`."""

from flashtile.api.padding import pad, unpad

__all__ = ["pad", "unpad"]
