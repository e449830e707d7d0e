"""flashtile: exact, IO-aware attention in pure Python."""

from __future__ import annotations

from typing import Any

from flashtile.attn.functional import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashtile.decode.cascade import flash_attn_with_shared_prefix
from flashtile.decode.functional import (
    append_kvcache,
    copy_blocks,
    flash_attn_combine,
    flash_attn_with_kvcache,
)
from flashtile.explanations import Explanation, explain
from flashtile.merge import merge_states

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "append_kvcache",
    "attention",
    "compat",
    "copy_blocks",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_attn_with_shared_prefix",
    "fp8",
    "merge_states",
    "nn",
    "sdpa",
]

_LATER = {
    "compat": "flashtile.compat",
    "fp8": "flashtile.fp8",
    "nn": "flashtile.nn",
    "sdpa": "flashtile.integrations.sdpa",
}


def __getattr__(name: str) -> Any:
    """What comes when it is asked for: FP8 alone would double the time that the import takes."""
    if name in _LATER:
        import importlib

        module = importlib.import_module(_LATER[name])
        return module.sdpa if name == "sdpa" else module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
