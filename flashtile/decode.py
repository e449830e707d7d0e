"""Decoding: attention of new queries over a key/value cache; its check on the user's machine, ``testing``."""

import sys

from flashtile.testing import decode as testing

__all__ = ["testing"]

sys.modules[f"{__name__}.testing"] = testing
