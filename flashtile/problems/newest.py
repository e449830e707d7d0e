"""The newest call of an operation, whose kernels may have to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

newest_call: ContextVar[Callable[[], Any] | None] = ContextVar("newest_call", default=None)
"""Function that repeats the newest call of this thread with a new signature, and launches the calls that will
follow, such as the backward pass. All tensors are on torch's "meta" device. None: nothing to repeat.

An operation sets it, and what compiles kernels uses it once, to know the other kernels of the call.
"""
