"""Checks of decoding on the user's machine; the module is :mod:`flashtile.testing.decode`."""

from flashtile.testing.decode import check

__all__ = ["check"]
