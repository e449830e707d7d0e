"""The private names of Transformers that flashtile uses are there, and only one module uses them."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.17")

import flashtile  # noqa: E402
from walk import walk  # noqa: E402

LOADING = "modeling_flash_attention_utils"
MODEL = "modeling_utils.PreTrainedModel"
BREAKS = {
    f"{LOADING}._lazy_imports": "generate_batch, and models that call the flash function by name",
    f"{LOADING}._loaded_implementation": "a second register() after unregister()",
    f"{LOADING}._pad_input": "padding in models that call the flash function by name",
    f"{LOADING}._unpad_input": "padding in models that call the flash function by name",
    f"{LOADING}._flash_attention_forward": "Falcon, GPT-J and Bark",
    f"{MODEL}._check_and_adjust_attn_implementation": "refusals, T5, and as_flash_attention",
    f"{MODEL}._supports_flash_attn": "refusals of models that would lose terms of their scores",
    f"{MODEL}._compatible_flash_implementations": "models with sinks, such as GPT-OSS",
    "modeling_utils.AttentionInterface._global_mapping": "unregister()",
    "masking_utils.AttentionMaskInterface._global_mapping": "unregister()",
    "utils.output_capturing._active_collector": "output_attentions of models that do not pass it on",
}  # fmt: skip
"""What a release of Transformers breaks that lacks a private name."""


@walk("name", BREAKS)
def test_a_private_name_is_there(name):
    module, _, attribute = name.rpartition(".")
    from transformers import masking_utils, modeling_flash_attention_utils, modeling_utils  # noqa: F401
    from transformers.utils import output_capturing  # noqa: F401

    assert hasattr(attrgetter(module)(transformers), attribute), f"without {name}: {BREAKS[name]}"


def test_one_module_uses_them():
    names = "|".join(name.rpartition(".")[2] for name in BREAKS)
    files = (Path(flashtile.__file__).parent / "integrations").glob("transformers*.py")
    users = {path.name for path in files if re.search(rf"\b({names})\b", path.read_text())}
    assert users == {"transformers_private.py"}
