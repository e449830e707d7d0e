"""Checks of FP8 attention on the user's machine; the module is :mod:`flashtile.testing.fp8`."""

from flashtile.testing.fp8 import check

__all__ = ["check"]
