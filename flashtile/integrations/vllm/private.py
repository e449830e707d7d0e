"""All names of vLLM that flashtile uses and that are no part of vLLM's interface for attention backends.

That interface is ``vllm.v1.attention.backend`` and its registry. It has no layer with latent attention, and
no scales of an FP8 cache. The rest of the package takes these names from here.
``tests/test_private_names.py`` says what breaks without each. They are in vLLM 0.25 to 0.33.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_PREFILL = "vllm.v1.attention.backends.mla.prefill"
NAMES = {
    "MLACommonBackend": _LATENT,
    "MLACommonImpl": _LATENT,
    "MLACommonMetadata": _LATENT,
    "MLACommonMetadataBuilder": _LATENT,
    "QueryLenSupport": _LATENT,
    "MLAPrefillBackend": f"{_PREFILL}.base",
    "MLAPrefillBackendEnum": f"{_PREFILL}.registry",
    "register_mla_prefill_backend": f"{_PREFILL}.registry",
    "get_kv_cache_layout": "vllm.v1.attention.backends.utils",
}
"""The module of each name. It is imported when the name is used: vLLM calls a plug-in in processes that need
no backend, and before its own modules are complete."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(NAMES[name]), name)


def scales_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the scales of a layer's keys and values in an FP8 cache: one number, or one for each head."""
    return layer._k_scale, layer._v_scale


def scales_on_host(layer: Any) -> tuple[float, float]:
    """Return the scales of a layer that has one number for its keys and one for its values."""
    return layer._k_scale_float, layer._v_scale_float


def prompts_of(backend: Any) -> Any:
    """Return the metadata of a step's prompts that :class:`MLAPrefillBackend` has stored."""
    return backend._prefill_metadata
