"""The score and mask functions of a call, in the form that its problem and its launch use."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.problems.common import POSITIONS

MAX_CAPTURED = 8
"""Maximum number of tensors that the functions of a call may read."""
CAPTURED = tuple(f"captured_{i}" for i in range(MAX_CAPTURED))
"""Names of these tensors."""

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


def positions_of(seqlen_q: int, seqlen_k: int) -> int:
    """Return the upper bound of positions for which a kernel is compiled.

    It is half of ``POSITIONS``, or the next power of two for longer sequences. Up to there, float32 holds a
    distance of two positions exactly, even after a moderate offset is added.
    """
    return max(POSITIONS // 2, 1 << (max(seqlen_q, seqlen_k, 1) - 1).bit_length())


@dataclass(frozen=True)
class Mods:
    """The score and mask functions of a call, as texts of programs (:mod:`flashtile.masks.program`).

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
    def given(self) -> str:
        """Name of the argument through which the user gave a function, for error messages."""
        return "score_mod" if self.score_mod else "block_mask" if self.block_size else "mask_mod"
