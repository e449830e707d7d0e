"""Groups of sequences that share blocks: which are found, and that they change no answer."""

from __future__ import annotations

import pytest
import torch
from engine_models import MODELS, VOCABULARY, folder, greedy, load, prompts

from flashtile.engine import BeamSearchParams, SamplingParams, groups

LENGTH = 14


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    """Let prompts of a few blocks be worth a group."""
    monkeypatch.setattr(groups, "MIN_SAVED_TOKENS", 1)


def grouped(name: str, **options):
    return load(name, cascade_attention=True, block_size=4, **options)


def test_try():
    params = [SamplingParams(temperature=0, n=3, max_tokens=LENGTH) for _ in range(5)]
    llm = grouped("llama3")
    outputs = llm.generate(prompts(), params)
    for output, expected in zip(outputs, greedy("llama3", LENGTH), strict=True):
        assert [one.token_ids for one in output.outputs] == [expected] * 3
    stats = llm.get_metrics()
    print(stats)
    assert 0 < stats.kv_reads_saved < stats.kv_reads
