"""A device: its compute capability and multiprocessor count, and whether its work is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashtile.hardware.cards import Card

INTERPRETER_MULTIPROCESSORS = 2
"""Multiprocessor count that is assumed for Triton's interpreter, enough for work to be split as on a GPU."""


@dataclass(frozen=True)
class Target:
    """Description of a GPU, which this machine need not have.

    A problem whose ``device`` is a Target gets the configuration that a call would have on that GPU.

    Args:
        name: common name, such as "H100".
        capability: CUDA's compute capability, (major, minor).
        multiprocessors: number of multiprocessors.
        hip: whether it is an AMD GPU, which has no compute capability.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    type: str = "cuda"
    hip: bool = False

    @staticmethod
    def of_card(card: Card) -> Target:
        """Return the target for a card of :data:`flashtile.io_model.CARDS`."""
        if not hasattr(card, "sm_count"):
            raise TypeError(f"card must be one of flashtile.io_model.CARDS, got {card!r}")
        return Target(card.name, card.capability, card.sm_count)

    @property
    def arch(self) -> str:
        """CUDA's name of the architecture, such as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    def __str__(self) -> str:
        article = "an" if self.name[:1] in "AEFHILMNORSX" else "a"  # names are read letter by letter: an H100
        return f"{article} {self.name}" if self.hip else f"{article} {self.name} ({self.arch})"


_NO_GPU = Target("CPU", (0, 0), INTERPRETER_MULTIPROCESSORS)
_of_meta: ContextVar[Target] = ContextVar("target_of_meta", default=_NO_GPU)


@contextlib.contextmanager
def compiling_for(gpu: Target | tuple[int, int]) -> Iterator[None]:
    """Let tensors on torch's "meta" device stand for tensors on ``gpu``, inside the context.

    ``gpu`` is a :class:`Target`, or a compute capability, which stands for any GPU that has it.
    """
    target = gpu if isinstance(gpu, Target) else Target("a GPU", gpu, INTERPRETER_MULTIPROCESSORS)
    token = _of_meta.set(target)
    try:
        yield
    finally:
        _of_meta.reset(token)


def is_nvidia(device: torch.device | Target) -> bool:
    """Whether ``device`` is an NVIDIA GPU, which has a compute capability."""
    hip = device.hip if isinstance(device, Target) else torch.version.hip is not None
    return device.type == "cuda" and not hip


def capability(device: torch.device | Target) -> tuple[int, int]:
    """Return CUDA's compute capability, (major, minor); (0, 0) for a device that is not an NVIDIA GPU.

    torch's "meta" device has the compute capability that :func:`compiling_for` has set.
    """
    if not is_nvidia(device):
        return _of_meta.get().capability if device.type == "meta" else (0, 0)
    return device.capability if isinstance(device, Target) else torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device | Target) -> int:
    """Return the number of a GPU's multiprocessors, or :data:`INTERPRETER_MULTIPROCESSORS` for other devices.

    torch's "meta" device has the number that :func:`compiling_for` has set.
    """
    if isinstance(device, Target):
        return device.multiprocessors
    if device.type == "meta":
        return _of_meta.get().multiprocessors
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is captured for a CUDA graph now, on the current stream.

    Memory that a captured kernel uses belongs to its graph, which may be replayed at any time.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
