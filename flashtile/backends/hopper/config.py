"""What the configurations of all Hopper kernels have in common. The tables are in ``forward``, ``backward``,
``fp8``."""

from typing import Any, ClassVar

WARPGROUP_ROWS = 64
"""Rows of a product that one warpgroup computes."""
PRODUCER_REGISTERS = 24
"""Of a thread of the producer."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Of a thread, by number of consumer warpgroups; with the producer's they fill the 64 K registers of an
SM."""
SHARING_REGISTERS = 104, 80
"""(consumer's, what each thread starts with) of two warpgroups, where two programs share an SM."""
LAUNCH_REGISTERS = {2: 168, 3: 128}
"""What each thread starts with, before the partitions trade: 65536 over all threads, in steps of 8."""


def padded(head_dim: int) -> int:
    """The head size that the tiles have: TMA fills what is missing with zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


class WithoutFunctions:
    """What variants of kernels say of functions of scores and masks, of dropout and of a bias; those of
    ``mods``, ``dropout`` and ``bias`` say otherwise."""

    HAS_BIAS: ClassVar[bool] = False
    """Scores get an additive bias."""
    STORES_DS: ClassVar[bool] = False
    """The backward writes dS as the gradient of a bias that no two of its cells share."""
    SEQUENCES_FIRST: ClassVar[bool] = False
    HAS_MODS: ClassVar[bool] = False
    HAS_CUTS: ClassVar[bool] = False
    """A mask hides keys by other than their distance to the row."""
    SCORE_MOD: ClassVar[Any] = None
    GUARD_SCORES: ClassVar[bool] = False
    """SCORE_MOD may give NaN where no score is seen; GUARD_FACTORS: so may its derivative."""
    GUARD_FACTORS: ClassVar[bool] = False
    MASK_MOD: ClassVar[Any] = None
    LISTED: ClassVar[bool] = False
    """A block mask lists the blocks to compute."""
    HAS_DROPOUT: ClassVar[bool] = False
