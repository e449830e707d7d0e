"""Small products and copies as ceilings: what this machine reaches is not what these tests ask."""

from __future__ import annotations

import pytest

from flashtile.hardware import timing


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.CEILING_SIZE, "cpu", 128)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**16)
