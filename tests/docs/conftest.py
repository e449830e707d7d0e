"""Examples run in this process, and some change other libraries: each test undoes what its examples did."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restore_libraries() -> Iterator[None]:
    """Undo what pages and docstrings register or install, so that tests after them can do otherwise."""
    yield
    if compat := sys.modules.get("flashtile.compat"):
        compat.uninstall_as_flash_attn()
    for library in ("torch", "transformers", "diffusers"):
        integration = sys.modules.get(f"flashtile.integrations.{library}")
        if integration is not None and library in sys.modules:
            with contextlib.suppress(NotImplementedError):  # a release of the library that register() refuses
                integration.unregister()
