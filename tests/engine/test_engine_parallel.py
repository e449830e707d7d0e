"""Tensor parallelism: two processes answer as one does."""

from __future__ import annotations

import contextlib
import json
import os
import re
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from engine_models import VOCABULARY, folder, folder_with_pairs, greedy, prompts
from safetensors.torch import load_file

from flashtile.engine import LLM, SamplingParams, groups, parallel
from flashtile.engine.parallel import ProcessRanks, Ranks, broadcast_changes, end_repeating, repeat_changes

LENGTH = 10
FAMILIES = ("llama2", "llama3", "gemma2", "olmo2", "phi3", "mixtral", "gpt_oss")
"""Every way in which weights are divided."""
UPDATED = ("phi3", "gpt_oss")
"""Families whose weights replace random ones: joined matrices, and stacked experts with biases."""
PATTERN = "[a-f]{4}(g|hi|jkl){3}"
STRUCTURED = SamplingParams(structured_outputs={"regex": PATTERN}, max_tokens=30, seed=1)


def in_a_process(rank: int, world: int, store: str, folders: dict, found: str) -> None:
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    answers, pairs = {}, folders.pop("pairs")
    params = SamplingParams(temperature=0, max_tokens=LENGTH, n=2)
    groups.MIN_SAVED_BYTES = 1
    for name, path in folders.items():
        llm = LLM(
            path, device="cpu", skip_tokenizer_init=True, tensor_parallel_size=world, block_size=4,
            load_format="dummy" if name in UPDATED else "auto",
        )  # fmt: skip
        if name in UPDATED:  # every process gives the whole weights
            llm.update_weights(load_file(f"{path}/model.safetensors"))
        assert llm.engine.runner.memory.k.shape[3] == llm.model_config.num_kv_heads // world
        answers[name] = [one.outputs[0].token_ids for one in llm.generate(prompts(), params)]
        assert llm.get_metrics().kv_reads_saved > 0
    guesses = {"model": folders["llama2"], "num_speculative_tokens": 3, "tree_width": 2}
    llm = LLM(
        folders["llama3"], device="cpu", skip_tokenizer_init=True, tensor_parallel_size=world, block_size=4,
        speculative_config=guesses, num_gpu_blocks_override=14 + rank,
    )  # fmt: skip
    assert llm.engine.scheduler.manager.pool.num_blocks == 14
    structured = LLM(pairs, load_format="dummy", device="cpu", tensor_parallel_size=world)
    if rank:
        repeat_changes(structured.engine)
        with mock.patch.object(llm.engine, "sleep", wraps=llm.engine.sleep) as slept:
            repeat_changes(llm.engine)
        slept.assert_called_once_with(2)
    else:
        broadcast_changes(structured.engine)
        answers["pairs"] = [one.outputs[0].text for one in structured.generate(["one", "two"], STRUCTURED)]
        end_repeating(structured.engine)
        broadcast_changes(llm.engine)
        llm.engine.add_request("aborted", prompts()[0], params)
        llm.engine.step()
        llm.engine.abort("aborted")
        answers["drafted"] = [one.outputs[0].token_ids for one in llm.generate(prompts(), params)]
        llm.reset_prefix_cache()
        llm.sleep(2)
        llm.wake_up(["weights"])
        with contextlib.suppress(ValueError):  # refused here, so the other process does not hear of it
            llm.update_weights(folders["gemma2"])
        llm.update_weights(folders["llama3"])
        llm.wake_up()
        again = [one.outputs[0].token_ids for one in llm.generate(prompts(), params)]
        assert again == answers["drafted"]
        end_repeating(llm.engine)
    assert llm.engine.requests == structured.engine.requests == {}
    ranks = ProcessRanks(world, torch.device("cpu"))
    if rank:
        assert ranks.receive() == "x" * 5000
    else:
        ranks.send("x" * 5000)
    with open(f"{found}-{rank}", "w") as file:
        json.dump(answers, file)
    dist.destroy_process_group()


def test_two_processes_answer_as_one_does(tmp_path):
    """Each holds half of the heads, of the MLP and of the vocabulary; one of them leads the other."""
    folders = {name: str(folder(name)) for name in FAMILIES}
    pairs = str(folder_with_pairs(tmp_path))
    torch.multiprocessing.spawn(
        in_a_process,
        (2, str(tmp_path / "store"), {**folders, "pairs": pairs}, str(tmp_path / "found")),
        nprocs=2,
    )
    expected = {name: [tokens[:LENGTH] for tokens in greedy(name, 14)] for name in folders}
    expected["drafted"] = expected["llama3"]
    answers = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    assert all(re.fullmatch(PATTERN, text) for text in answers[0].pop("pairs"))
    assert answers[0] == expected
    assert answers[1] == {name: expected[name] for name in folders}


def test_random_weights_are_parts_of_the_same_model():
    """What all processes have is the same in all of them; what is divided differs."""
    from flashtile.engine.config import read_config
    from flashtile.engine.weights import random_weights

    config = read_config(folder("llama3"))
    one, two = (
        random_weights(config, torch.device("cpu"), torch.float32, ranks=Ranks(rank, 2)) for rank in (0, 1)
    )
    assert torch.equal(one("model.embed_tokens.weight"), two("model.embed_tokens.weight"))
    assert one("lm_head.weight").shape == (VOCABULARY // 2, 64)
    assert not torch.equal(one("lm_head.weight"), two("lm_head.weight"))


def test_the_first_process_starts_the_others(monkeypatch):
    started = []

    def start(command, env):
        assert command == ["serve"]
        started.append(env)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(os, "environ", {"KEPT": "x"})
    monkeypatch.setattr(parallel.subprocess, "Popen", start)
    monkeypatch.setattr(parallel, "_join_group", lambda device: None)
    others, store = parallel.start_others(["serve"], 3, torch.device("cpu"))
    assert len(others) == 2
    port = str(store.port)
    for rank, place in enumerate((os.environ, *started)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "KEPT": "x"}
        assert own.items() <= place.items()
        assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("127.0.0.1", port)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
