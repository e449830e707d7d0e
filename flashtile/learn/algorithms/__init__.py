"""The papers' attention algorithms in readable torch; a Memory moves all tiles and counts every byte."""

from flashtile.learn.algorithms.memory import Array, Memory, Sram, SramExceededError, Tile
from flashtile.learn.algorithms.trace import Event, Span, Trace

__all__ = ["Array", "Event", "Memory", "Span", "Sram", "SramExceededError", "Tile", "Trace"]
