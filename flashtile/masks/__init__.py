"""Score and mask functions: user-defined and predefined ones, and block masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_IN_MODULES = {
    **dict.fromkeys(("BlockMask", "create_block_mask"), "block_mask"),
    **dict.fromkeys(("MaskMod", "ScoreMod", "from_triton", "mask_mod", "score_mod"), "mods"),
    "create_tree_mask": "trees",
}
"""Modules of the public names; all other names are in ``library``."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use. Kernels import programs of this package in calls without any."""
    import importlib

    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_IN_MODULES.get(name, 'library')}")
        globals()[name] = found = getattr(module, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
