"""FlashAttention's modules under their own names (:func:`install_as_flash_attn`)."""

from __future__ import annotations

import importlib
import sys

_PACKAGE = "flashtile.compat"
MODULES = (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.cute",
    "flash_attn.cute.interface",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
)
"""The modules of FlashAttention-2, of FlashAttention-4 (``cute``) and of FlashAttention-3 (the last one)."""


def install_as_flash_attn() -> None:
    """Make ``import flash_attn`` and ``import flash_attn_interface`` find flashtile in this process.

    Code written for FlashAttention then runs unchanged: ``from flash_attn import flash_attn_func``,
    ``flash_attn.bert_padding``, ``flash_attn.layers.rotary``, FlashAttention-3's ``flash_attn_interface`` and
    FlashAttention-4's ``flash_attn.cute``. Libraries for context parallelism, which call
    ``_flash_attn_forward`` and ``_flash_attn_backward``, also run unchanged.

    Call this before that code is imported. A second call changes nothing. An installed flash-attn package is
    hidden, provided that none of its modules was imported before.

    This does not change what ``importlib.metadata`` finds. For code that looks up the version of flash-attn
    there, such as Transformers, use :func:`flashtile.integrations.transformers.register`.

    Raises:
        RuntimeError: one of the modules has been imported from elsewhere. Nothing is changed then.

    Examples:
        >>> flashtile.compat.install_as_flash_attn()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import unpad_input
        >>> flash_attn_func.__wrapped__ is flashtile.flash_attn_func
        True
        >>> flashtile.compat.uninstall_as_flash_attn()
    """
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__name__ != f"{_PACKAGE}.{name}":
            place = getattr(module, "__file__", None)
            raise RuntimeError(
                f"{name} must not be imported before install_as_flash_attn(), got a module from {place}"
            )
    for name in MODULES:
        sys.modules[name] = importlib.import_module(f"{_PACKAGE}.{name}")


def uninstall_as_flash_attn() -> None:
    """Undo :func:`install_as_flash_attn`. Objects that were imported from ``flash_attn`` stay usable."""
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__name__ == f"{_PACKAGE}.{name}":
            del sys.modules[name]
