"""The server on a GPU: once it is ready, no call waits for a compiler."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from serving import running, write_alphabet_model
from traffic import AT_A_TIME, OPTIONS

pytest.importorskip("triton")

import triton

pytestmark = pytest.mark.gpu

KINDS = (
    {}, {"temperature": 0}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 9}, {"frequency_penalty": 0.5}, {"n": 3},
    {"logit_bias": {"70": 2.0}}, {"logprobs": 2},
    *([{"structured_outputs": {"regex": "[a-f]{3}(g|hi){2,9}"}}] if find_spec("llguidance") else []),
)  # fmt: skip


@pytest.mark.parametrize("eager", [False, True])
def test_nothing_is_compiled_after_the_server_is_ready(tmp_path: Path, monkeypatch, eager: bool):
    """Under calls like those of the soak test, of which some must wait for memory."""
    cache, compiled, compile_ = tmp_path / "cache", [], triton.compile
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    (tmp_path / "model").mkdir()
    model = write_alphabet_model(tmp_path / "model")
    options = {**OPTIONS, "num_gpu_blocks_override": 48, "enforce_eager": eager}
    draw = random.Random(0)

    def counted(src, *given, **more):
        compiled.append(src.name)
        return compile_(src, *given, **more)

    def body() -> dict:
        prompt = "".join(chr(97 + draw.randrange(26)) for _ in range(draw.randrange(1, 24)))
        return {"prompt": prompt, "max_tokens": draw.randrange(1, 40), **draw.choice(KINDS)}

    with running(model, device="cuda", dtype="bfloat16", **options) as server:
        before = set(cache.rglob("*.cubin"))
        monkeypatch.setattr(triton, "compile", counted)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            answers = [
                *pool.map(lambda fields: server.ask("/v1/completions", fields), [body() for _ in range(150)])
            ]
        preemptions = server.llm.engine.scheduler.num_preemptions
    assert {status for status, _ in answers} == {200}
    assert preemptions > 0
    assert before
    assert compiled == []
    assert set(cache.rglob("*.cubin")) == before
