"""Integrations into other libraries. Importing this package changes no library; calling a function does."""

from __future__ import annotations

from typing import Any

_LATER = ("diffusers", "sdpa", "sglang", "torch", "transformers", "vllm")


def __getattr__(name: str) -> Any:
    """Import the module of a library at its first use."""
    import importlib

    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(_LATER)
