"""The attention algorithms as readable torch, moving tiles only through a Memory that counts every byte."""

from flashtile.algorithms.memory import Array, Memory, Sram, SramExceededError
from flashtile.algorithms.trace import Event, Span, Trace

__all__ = ["Array", "Event", "Memory", "Span", "Sram", "SramExceededError", "Trace"]
