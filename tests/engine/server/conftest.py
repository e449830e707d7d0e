"""One model for all tests of the server; modules start servers of it as they need them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    from serving import write_alphabet_model

    return write_alphabet_model(tmp_path_factory.mktemp("alphabet"))
