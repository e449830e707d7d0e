"""Small models of Transformers with random weights, and the state in which tests of them begin."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from flashtile.integrations.transformers import NAMES, register, unregister  # noqa: E402

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0] * 4 + [1] * 8, [1] * 12, [0] * 7 + [1] * 5])
"""Padded on the left."""


@pytest.fixture(autouse=True)
def registered():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    register()
    yield
    unregister()
    transformers.logging.set_verbosity(verbosity)


def pair(kind: str, config) -> tuple:
    """The same weights, computed eagerly and by flashtile."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = cls._from_config(copy.deepcopy(config), attn_implementation=NAMES[0]).eval()
    ours.load_state_dict(eager.state_dict())
    assert eager.config._attn_implementation == "eager"
    assert ours.config._attn_implementation == NAMES[0]
    return eager, ours
