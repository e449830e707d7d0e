"""One model for all tests of the server; modules start servers of it as they need them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("aiohttp") and find_spec("safetensors") else ["*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    from serving import write_alphabet_model

    return write_alphabet_model(tmp_path_factory.mktemp("alphabet"))
