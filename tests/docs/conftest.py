"""Examples run in this process, and some change other libraries: each test undoes what its examples did."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restore_libraries() -> Iterator[None]:
    """Undo ``register()`` of the pages and docstrings, so that tests after them can register otherwise."""
    yield
    in_torch = sys.modules.get("flashtile.integrations.torch")
    if in_torch is not None:
        in_torch.unregister()
    integration = sys.modules.get("flashtile.integrations.transformers")
    if integration is not None and "transformers" in sys.modules:
        with contextlib.suppress(NotImplementedError):  # a release of Transformers that register() refuses
            integration.unregister()
