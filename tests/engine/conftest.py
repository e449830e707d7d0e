"""The tests of the engine have small caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _small_caches() -> Iterator[None]:
    """Let a CPU's KV cache have 32 MiB. To fill the default, which is 1 GiB, takes as long as most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashtile.engine.memory.CPU_CACHE_BYTES", 2**25)
        yield
