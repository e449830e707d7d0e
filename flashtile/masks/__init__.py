"""Score and mask functions: user-defined and predefined ones, and block masks."""

from flashtile.masks.block_mask import BlockMask, create_block_mask
from flashtile.masks.library import (
    alibi,
    causal,
    dilated,
    document,
    natten,
    padding,
    prefix_lm,
    relative_position,
    softcap,
    window,
)
from flashtile.masks.mods import MaskMod, ScoreMod, from_triton, mask_mod, score_mod
from flashtile.masks.trees import create_tree_mask

__all__ = [
    "BlockMask",
    "MaskMod",
    "ScoreMod",
    "alibi",
    "causal",
    "create_block_mask",
    "create_tree_mask",
    "dilated",
    "document",
    "from_triton",
    "mask_mod",
    "natten",
    "padding",
    "prefix_lm",
    "relative_position",
    "score_mod",
    "softcap",
    "window",
]
