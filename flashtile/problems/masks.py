"""The score and mask functions of a call, in the form that its problem and its launch use."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flashtile.problems.common import POSITIONS, cached

if TYPE_CHECKING:  # imported by calls with functions only, to keep `import flashtile` cheap
    from flashtile.problems.mask_program import Program

MAX_CAPTURED = 8
"""Maximum number of tensors that the functions of a call may read."""

MAX_SIZES = 16
"""Maximum total number of dimensions of the captured tensors of a call.

Kernels have this many int arguments. They hold the tensors' sizes, and the remaining ones hold numbers that
occur in the programs.
"""

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
"""Names of a block mask's lists."""
BACKWARD_LISTS = 4
"""Number of lists at the end of ``LISTS`` that only the backward pass reads."""


@dataclass(frozen=True)
class Mods:
    """The score and mask functions of a call, as texts of programs (:mod:`flashtile.problems.mask_program`).

    Both programs index the same list of captured tensors.
    """

    score_mod: str = ""
    """Program of score_mod, "" for none."""
    mask_mod: str = ""
    """Program of mask_mod, "" for none."""
    learned: tuple[int, ...] = ()
    """Indices of captured tensors that need a gradient."""
    ranks: tuple[int, ...] = ()
    """Number of dimensions of each captured tensor."""
    block_size: tuple[int, int] | None = None
    """Numbers of queries and keys in a block of the block mask."""
    list_heads: int = 1
    """Number of heads in the block mask's lists: all query heads, or 1 if all heads share the lists."""
    positions: int = POSITIONS
    """Upper bound of query and key positions: it decides which ints fit in 32 bits."""

    @property
    def score_program(self) -> Program | None:
        return _program(self.score_mod)

    @property
    def mask_program(self) -> Program | None:
        return _program(self.mask_mod)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Ints in the programs that are launch arguments of the kernel instead of compile-time constants.

        They are the first ``MAX_SIZES - sum(ranks)`` distinct ints that :func:`variables` yields, first for
        score_mod and then for mask_mod.
        """
        from flashtile.problems.mask_program import variables

        programs = (program for program in (self.score_program, self.mask_program) if program is not None)
        found = dict.fromkeys(number for program in programs for number in variables(program))
        return tuple(found)[: MAX_SIZES - sum(self.ranks)]

    def kernel_sizes(self, captured: Iterable[Tensor | None]) -> list[int]:
        """Return the ``MAX_SIZES`` int arguments of a launch.

        They are the sizes of the captured tensors, then zeros, then ``numbers`` in reverse order.
        """
        sizes = [size for tensor in captured if tensor is not None for size in tensor.shape]
        return sizes + [0] * (MAX_SIZES - len(sizes) - len(self.numbers)) + [*reversed(self.numbers)]

    @property
    def given(self) -> str:
        """Name of the argument through which the user gave a function, for error messages."""
        return "score_mod" if self.score_mod else "block_mask" if self.block_size else "mask_mod"


def _program(text: str) -> Program | None:
    from flashtile.problems.mask_program import parse

    return parse(text) if text else None


@cached
def behind(text: str, first: int) -> str:
    """Add ``first`` to the indices of a mask program's captured tensors, and return the program's text.

    The list of captured tensors then starts with ``first`` tensors of another program.
    """
    from flashtile.problems.mask_program import parse, renumbered

    return str(renumbered(parse(text), {i: first + i for i in range(MAX_CAPTURED)}))
