"""The model families. The module of a ``model_type`` declares how the family differs from Llama.

A declaration has the fields and defaults of the family's config class in Transformers, the names of its
weights, and switches. :mod:`flashtile.engine.config` reads ``config.json`` by it,
:mod:`flashtile.engine.weights` derives the names and shapes of the weights, and :mod:`flashtile.engine.model`
computes the layers. To add a family, write its module and list it here.
"""

from importlib import import_module

from flashtile.engine.families.family import Experts, Family

__all__ = ["FAMILIES", "Experts", "Family"]

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "phi3", "mixtral",
    "qwen3_moe", "gpt_oss",
)  # fmt: skip
FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in NAMES}
"""The families, keyed by ``model_type``."""
