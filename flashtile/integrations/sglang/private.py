"""All names of SGLang that flashtile uses and that are no part of its interface for attention backends.

That interface is the base class of backends and the function that registers one. What a backend needs
besides, such as the pool's types, has no documented name. The rest of the package takes these names from
here. ``tests/test_private_names.py`` says what breaks without each. They are in SGLang 0.5.23.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

_CONTEXT = "sglang.srt.runtime_context"
_CHOICES = "sglang.srt.arg_groups.choices"
NAMES = {
    "ATTENTION_BACKEND_CHOICES": _CHOICES,
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": _CHOICES,
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": _CHOICES,
    "AttentionArch": "sglang.srt.configs.model_config",
    "AttentionType": "sglang.srt.layers.radix_attention",
    "KVWriteLoc": "sglang.srt.mem_cache.memory_pool",
    "SWAKVPool": "sglang.srt.mem_cache.swa_memory_pool",
    "get_exec": _CONTEXT,
    "get_parallel": _CONTEXT,
    "get_spec": _CONTEXT,
}
"""The module of each name. It is imported when the name is used: SGLang calls a plug-in before it reads its
arguments, in processes that need no backend."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(NAMES[name]), name)


def output_of(batch: Any) -> Tensor | None:
    """Return the memory that SGLang has allocated for a step's attention, if any."""
    found: Tensor | None = batch._attn_output
    return found
