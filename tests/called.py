"""What Python does, counted: the same on every machine, unlike times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def functions_called(call: Callable[[], Any]) -> int:
    """Functions that a call calls, Python's and C's.

    Garbage is not collected meanwhile, because libraries add callbacks to the collector, as Hypothesis does.
    """
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
