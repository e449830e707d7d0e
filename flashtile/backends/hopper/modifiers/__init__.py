"""Device steps that change the scores or probabilities of a tile: an additive bias, dropout, score and mask
functions, the lists of a block mask.

The forward and the backward kernel have the steps that the flags of their variant name
(``config.ModifierFlags``). Other steps are not compiled.
"""

from typing import Any, NamedTuple


class Modifiers(NamedTuple):
    """Modifiers of a warpgroup's tile, as a kernel's functions take them. 0 stands for an absent modifier."""

    bias: Any
    """The channel that brings tiles of the bias, as :class:`~flashtile.backends.hopper.channels.Channel`."""
    dropout: Any
    """A :class:`~flashtile.backends.hopper.modifiers.dropout.Generator`."""
    functions: Any
    """:class:`~flashtile.backends.hopper.modifiers.functions.FunctionArguments`."""
    blocks: Any
    """A :class:`~flashtile.backends.hopper.modifiers.block_lists.BlockList`."""
