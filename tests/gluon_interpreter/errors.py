"""Errors that the interpreter finds in a kernel."""

from __future__ import annotations


class KernelError(AssertionError):
    """A kernel relies on undefined behaviour, or uses data before it is there."""


class DeadlockError(KernelError):
    """No partition of any program can go on."""
