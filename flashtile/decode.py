"""Decoding on the user's machine: ``testing`` checks attention of new queries over a key/value cache."""

import sys

from flashtile.testing import decode as testing

__all__ = ["testing"]

sys.modules[f"{__name__}.testing"] = testing
