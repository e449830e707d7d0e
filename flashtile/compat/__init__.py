"""FlashAttention's modules by their own names, for code that imports them: :func:`install_as_flash_attn`."""

from __future__ import annotations

import importlib
import sys

_PACKAGE = "flashtile.compat"
MODULES = (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
)
"""FlashAttention-2's, and FlashAttention-3's one."""


def install_as_flash_attn() -> None:
    """Let ``import flash_attn`` and ``import flash_attn_interface`` find flashtile, in this process.

    What was written for FlashAttention then runs unchanged: ``from flash_attn import flash_attn_func``,
    ``flash_attn.bert_padding``, ``flash_attn.layers.rotary``, FlashAttention-3's ``flash_attn_interface``,
    and the functions below autograd that context parallelism calls, ``_flash_attn_forward`` and
    ``_flash_attn_backward``. Call it before that code is imported; again, it changes nothing. An installed
    flash-attn package is hidden, as long as nothing of it has been imported.

    It is no installed distribution: code that asks ``importlib.metadata`` for flash-attn's version, as
    Transformers does, finds none (:func:`flashtile.integrations.transformers.register` is for that).

    Raises:
        RuntimeError: one of the modules has been imported from elsewhere. Nothing is changed then.

    Examples:
        >>> flashtile.compat.install_as_flash_attn()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import unpad_input
        >>> flash_attn_func is flashtile.flash_attn_func
        True
        >>> flashtile.compat.uninstall_as_flash_attn()
    """
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__name__ != f"{_PACKAGE}.{name}":
            place = getattr(module, "__file__", None)
            raise RuntimeError(f"{name} has been imported from {place}: call install_as_flash_attn() before")
    for name in MODULES:
        sys.modules[name] = importlib.import_module(f"{_PACKAGE}.{name}")


def uninstall_as_flash_attn() -> None:
    """Take the names back. What has been imported by them stays as it is."""
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__name__ == f"{_PACKAGE}.{name}":
            del sys.modules[name]
