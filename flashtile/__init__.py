"""flashtile: exact, IO-aware attention in pure Python."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from flashtile.version import __version__ as __version__


def _is_command_line() -> bool:
    """Whether this process is the ``flashtile`` command. Its help and its refusals need no torch."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    # While Python looks for the module after -m, "-m" is in its place.
    return program == "flashtile" or (program == "-m" and sys.orig_argv[-len(sys.argv)] == "flashtile")


if TYPE_CHECKING or not _is_command_line():
    # Programs get the operators with the package, because files of torch.export refer to them.
    from flashtile.api.attention import (
        attention,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )

if TYPE_CHECKING:
    from flashtile.api.cascade import flash_attn_with_shared_prefix
    from flashtile.api.decode import (
        append_kvcache,
        copy_blocks,
        flash_attn_combine,
        flash_attn_with_kvcache,
    )
    from flashtile.api.explain import Explanation, explain
    from flashtile.api.merge import merge_states
    from flashtile.api.score_profile import profile_scores
    from flashtile.api.tree import tree_attention
    from flashtile.api.weights import attention_weights

__all__ = [
    "LLM",
    "Explanation",
    "SamplingParams",
    "append_kvcache",
    "attention",
    "attention_weights",
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
    "flex_attention",
    "fp8",
    "linear",
    "masks",
    "merge_states",
    "nn",
    "parallel",
    "profile_scores",
    "record_calls",
    "sdpa",
    "tree_attention",
    "use_compiled",
    "warmup",
]

_LATER = (
    "algorithms", "compat", "decode", "demo", "dropout", "engine", "fp8", "integrations", "io_model",
    "kv_cache", "learn", "linear", "machine", "masks", "nn", "padding", "parallel", "reference", "testing",
)  # fmt: skip
"""Subpackages and modules, imported at their first use."""
_IN_MODULES = {
    "Explanation": "flashtile.api.explain",
    "append_kvcache": "flashtile.api.decode",
    "attention": "flashtile.api.attention",
    "attention_weights": "flashtile.api.weights",
    "copy_blocks": "flashtile.api.decode",
    "explain": "flashtile.api.explain",
    "flash_attn_combine": "flashtile.api.decode",
    "flash_attn_func": "flashtile.api.attention",
    "flash_attn_kvpacked_func": "flashtile.api.attention",
    "flash_attn_qkvpacked_func": "flashtile.api.attention",
    "flash_attn_varlen_func": "flashtile.api.attention",
    "flash_attn_varlen_kvpacked_func": "flashtile.api.attention",
    "flash_attn_varlen_qkvpacked_func": "flashtile.api.attention",
    "flash_attn_with_kvcache": "flashtile.api.decode",
    "flash_attn_with_shared_prefix": "flashtile.api.cascade",
    "flex_attention": "flashtile.compat.flex",
    "LLM": "flashtile.engine",
    "SamplingParams": "flashtile.engine",
    "merge_states": "flashtile.api.merge",
    "profile_scores": "flashtile.api.score_profile",
    "record_calls": "flashtile.compilation.calls",
    "sdpa": "flashtile.integrations.sdpa",
    "tree_attention": "flashtile.api.tree",
    "use_compiled": "flashtile.backends.common.kernel_store",
    "warmup": "flashtile.tools.warmup",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because importing all of them would double the import time."""
    import importlib

    if name in _LATER:
        return importlib.import_module(f"flashtile.{name}")
    if name in _IN_MODULES:
        globals()[name] = found = getattr(importlib.import_module(_IN_MODULES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and the modules, whether they are imported or not."""
    return sorted({*__all__, *_LATER, "__version__"})
