"""Python's garbage collection, during work that leaves little garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Postpone Python's garbage collections, in all threads, until the context ends.

    Imports and compilations make many objects and little garbage. In a program with torch, one full
    collection takes 50 to 90 ms, and the import of triton causes one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
