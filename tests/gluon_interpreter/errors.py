"""What the interpreter finds wrong in a kernel."""

from __future__ import annotations


class KernelError(AssertionError):
    """A kernel does what a GPU does not define, or computes with what is not there yet."""


class DeadlockError(KernelError):
    """No partition of any program can go on."""
