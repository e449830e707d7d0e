"""Names of models in place of folders: where the hub cache is, and what it must hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from flashtile.engine import LLM
from flashtile.engine.config import model_folder

CONFIG = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one model in two revisions, found by HF_HUB_CACHE, in a folder without models."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    hub = tmp_path / "cache" / "huggingface" / "hub"
    stored = hub / "models--some-org--Small-1.5B"
    for revision in ("old", "new"):
        (stored / "snapshots" / revision).mkdir(parents=True)
        (stored / "snapshots" / revision / "config.json").write_text(json.dumps(CONFIG))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("new\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    return hub


def test_a_name_is_the_snapshot_of_main(cache, monkeypatch, tmp_path):
    expected = cache / "models--some-org--Small-1.5B" / "snapshots" / "new"
    assert model_folder("some-org/Small-1.5B") == expected
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, place in (("XDG_CACHE_HOME", "cache"), ("HF_HOME", "cache/huggingface")):
        monkeypatch.setenv(name, str(tmp_path / place))
        assert model_folder("some-org/Small-1.5B") == expected
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cache").rename(tmp_path / ".cache")
    assert model_folder("some-org/Small-1.5B").is_relative_to(tmp_path / ".cache")


def test_a_folder_comes_before_a_name(cache, tmp_path):
    (tmp_path / "here" / "some-org" / "Small-1.5B").mkdir(parents=True)
    assert str(model_folder("some-org/Small-1.5B")) == "some-org/Small-1.5B"
    for path in ("/no/such/folder", "nowhere", "../a", "./a/b", "a/b/c"):
        assert model_folder(path) == Path(path)


def test_what_is_no_path_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"model must be a folder, or a name in .*, got Linear"):
        LLM(torch.nn.Linear(2, 2))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"device": "cpu", "load_format": "dummy"}
    with pytest.raises(TypeError, match=r"tokenizer must be a folder, or a name in .*, got int"):
        LLM(tmp_path, tokenizer=3, **options)
    with pytest.raises(TypeError, match="generation_config must be 'auto', 'vllm' or a folder, got dict"):
        LLM(tmp_path, generation_config={"top_k": 3}, **options)


@pytest.mark.parametrize("missing", ["model", "refs/main", "snapshots/new"])
def test_a_model_that_is_not_in_the_cache(cache, missing):
    stored = cache / "models--some-org--Small-1.5B"
    gone = stored if missing == "model" else stored / missing
    gone.rename(cache / "gone")
    message = r"model must be .*hub cache " + re.escape(str(cache)) + ".*`hf download some-org/Small-1.5B`"
    with pytest.raises(FileNotFoundError, match=message):
        LLM("some-org/Small-1.5B", device="cpu")


def test_an_engine_and_its_draft_take_names(cache):
    name = "some-org/Small-1.5B"
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "block_size": 4}
    draft = {"method": "draft_model", "model": name, "num_speculative_tokens": 2}
    llm = LLM(name, num_gpu_blocks_override=32, speculative_config=draft, **options)
    (answer,) = llm.generate({"prompt_token_ids": [1, 2]})
    assert len(answer.outputs[0].token_ids) == 16
