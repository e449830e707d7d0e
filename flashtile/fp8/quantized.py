"""The module that pickles of version 0.1 name; it is :mod:`flashtile.problems.quantized` now."""

from flashtile.problems.quantized import Quantized

__all__ = ["Quantized"]
