"""The newest call of an operation, whose kernels may have to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

newest_call: ContextVar[Callable[[], Any] | None] = ContextVar("newest_call", default=None)
"""Function that repeats the call of this thread whose signature was the last new one, and the calls that will
follow it, such as the backward pass. All tensors are on torch's "meta" device. None: nothing to repeat.

An operation sets it. When a kernel must be compiled, ``backends/common/first_calls.py`` calls the function to
find the other kernels of the call, and sets None.
"""
