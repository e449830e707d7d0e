"""What a call's functions of scores and masks are, for its description and its launch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from flashtile.problems.mask_program import Program, parse, renumbered, variables
from flashtile.problems.mask_ranges import POSITIONS

MAX_CAPTURED = 8
"""Tensors that the functions of a call may read."""

MAX_SIZES = 16
"""Dimensions of all these tensors together. Kernels take so many ints: their sizes and, in the places that
are left, numbers of the programs."""


@dataclass(frozen=True)
class Mods:
    """The functions as texts of programs, which read the captured tensors of one list."""

    score_mod: str = ""
    """"" is none; so for ``mask_mod``."""
    mask_mod: str = ""
    learned: tuple[int, ...] = ()
    """Captured tensors that want a gradient."""
    ranks: tuple[int, ...] = ()
    """Dimensions of each captured tensor."""
    block_size: tuple[int, int] | None = None
    """Queries by keys, of a block mask."""
    list_heads: int = 1
    """Query heads that the block mask tells apart, 1 if all share it."""
    positions: int = POSITIONS
    """More than there are queries or keys: it says which ints fit 32 bits."""

    @property
    def score_program(self) -> Program | None:
        return parse(self.score_mod) if self.score_mod else None

    @property
    def mask_program(self) -> Program | None:
        return parse(self.mask_mod) if self.mask_mod else None

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Of the programs, that kernels are given when they are launched."""
        programs = (program for program in (self.score_program, self.mask_program) if program is not None)
        found = dict.fromkeys(number for program in programs for number in variables(program))
        return tuple(found)[: MAX_SIZES - sum(self.ranks)]

    def kernel_sizes(self, captured: Iterable[Tensor | None]) -> list[int]:
        """The MAX_SIZES ints of a launch: sizes of captured tensors in turn; ``numbers`` from the end on."""
        sizes = [size for tensor in captured if tensor is not None for size in tensor.shape]
        return sizes + [0] * (MAX_SIZES - len(sizes) - len(self.numbers)) + [*reversed(self.numbers)]

    @property
    def given(self) -> str:
        """The first argument of the user's that is there."""
        return "score_mod" if self.score_mod else "block_mask" if self.block_size else "mask_mod"


@functools.lru_cache(maxsize=1024)
def behind(text: str, first: int) -> str:
    """The text of the same program, its captured tensors numbered from ``first`` on."""
    return str(renumbered(parse(text), {i: first + i for i in range(MAX_CAPTURED)}))
