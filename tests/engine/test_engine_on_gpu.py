"""The engine on a GPU: graphs with guesses, no hidden waits, the model over two cards."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engine_models import MODELS, VOCABULARY, folder, folder_with_pairs, greedy, load, prompts

from flashtile.engine import LLM, SamplingParams, groups, runner
from flashtile.engine.device import Capture
from flashtile.engine.parallel import ProcessRanks
from flashtile.engine.structured import mask

pytestmark = pytest.mark.gpu
LENGTH = 14


def draft(width: int) -> dict:
    return {"model": folder("llama2"), "num_speculative_tokens": 3, "tree_width": width}


@pytest.mark.parametrize("guesses", [None, "look-up", "row", "tree"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_captured_steps_give_the_tokens_of_transformers(name, guesses):
    config = {"row": draft(1), "tree": draft(3), "look-up": {"method": "ngram"}, None: None}[guesses]
    llm = load(name, device="cuda", dtype="float32", block_size=16, speculative_config=config)
    for _ in range(2):
        outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
        assert [output.outputs[0].token_ids for output in outputs] == greedy(name, LENGTH)
    forms = llm.engine.runner.graphs
    assert forms
    assert any(form.width > 1 for form in forms) == (guesses is not None)
    llm.engine.scheduler.manager.check_integrity()


def let_all_be_grouped(monkeypatch, most=6):
    """Groups however little they save, and with chunks of more than ``most`` tokens apart.

    No sequence with guesses may have more new tokens, and none has with the engine's own bound.
    """
    monkeypatch.setattr(groups, "MIN_SAVED_BYTES", 1)
    for module in (groups, runner):
        monkeypatch.setattr(module, "MAX_NEW_TOKENS", most)


@pytest.mark.parametrize("guesses", [None, "look-up", "row", "tree"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma2", "phi3"])
def test_captured_steps_with_groups_give_the_tokens_of_transformers(name, guesses, monkeypatch):
    """The second time, prompts also share what the prefix cache has. Long chunks are apart."""
    if guesses == "tree" and "sliding_window" in MODELS[name]:
        pytest.skip("trees need layers without windows")
    let_all_be_grouped(monkeypatch, 11 if guesses == "tree" else 6)
    config = {"row": draft(1), "tree": draft(3), "look-up": {"method": "ngram"}, None: None}[guesses]
    llm = load(
        name, device="cuda", dtype="float32", block_size=4, speculative_config=config,
        max_num_batched_tokens=24, max_num_seqs=15,
    )  # fmt: skip
    for _ in range(2):
        outputs = llm.generate(prompts(), SamplingParams(n=3, temperature=0, max_tokens=LENGTH))
        for output, expected in zip(outputs, greedy(name, LENGTH), strict=True):
            assert [one.token_ids for one in output.outputs] == [expected] * 3
    levels = (longest for form in llm.engine.runner.graphs for _, longest in form.levels)
    assert {*map(len, levels)} >= ({1, 2} if guesses is None else {1})
    assert llm.get_metrics().kv_reads_saved > 0
    llm.engine.scheduler.manager.check_integrity()


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_of_every_family_give_the_tokens_of_transformers(name):
    llm = load(name, device="cuda", dtype="float32", block_size=16)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
    assert [output.outputs[0].token_ids for output in outputs] == greedy(name, LENGTH)
    assert llm.engine.runner.graphs


@pytest.mark.parametrize("guesses", [None, "row"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_frees_memory_and_captures_again(level, guesses):
    config = None if guesses is None else draft(1)
    llm = load(
        "llama3", device="cuda", dtype="float32", block_size=16, num_gpu_blocks_override=4096,
        speculative_config=config,
    )  # fmt: skip
    params, memory = SamplingParams(temperature=0, max_tokens=LENGTH), llm.engine.runner.memory
    llm.generate(prompts(), params)
    graphs, bytes_of_cache = len(llm.engine.runner.graphs), memory.k.nbytes + memory.v.nbytes
    before = torch.cuda.memory_allocated()
    llm.sleep(level)
    assert torch.cuda.memory_allocated() <= before - bytes_of_cache
    llm.wake_up()
    if level == 2:
        llm.update_weights(folder("llama3"))
    outputs = llm.generate(prompts(), params)
    assert [output.outputs[0].token_ids for output in outputs] == greedy("llama3", LENGTH)
    assert len(llm.engine.runner.graphs) == graphs


def test_graphs_compute_with_new_weights():
    llm = load("llama3", device="cuda", dtype="float32", block_size=16, load_format="dummy")
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    llm.generate(prompts(), params)
    graphs = dict(llm.engine.runner.graphs)
    llm.generate(prompts(), replace(params, max_tokens=100, stop_token_ids=list(range(0, VOCABULARY, 2))))
    assert llm.engine.has_unfinished  # a step that was launched before the last answer's end was read
    llm.update_weights(folder("llama3"))
    outputs = llm.generate(prompts(), params)
    assert [output.outputs[0].token_ids for output in outputs] == greedy("llama3", LENGTH)
    assert graphs
    assert {form: llm.engine.runner.graphs[form] for form in graphs} == graphs


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_captured_experts_in_one_kernel_give_the_tokens_of_eager_steps(name):
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    options = {"device": "cuda", "dtype": "float16", "block_size": 16}
    found, expected = (
        [output.outputs[0].token_ids for output in load(name, **options, **more).generate(prompts(), params)]
        for more in ({}, {"enforce_eager": True})
    )
    assert found == expected


@pytest.mark.parametrize("width", [1, 3])
def test_sampled_tokens_are_those_without_guesses_on_a_gpu(width):
    params = [SamplingParams(seed=i, max_tokens=12, top_p=0.9, temperature=0.7) for i in range(5)]
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(prompts(), params)]
        for llm in (
            load("llama3", device="cuda", dtype="float32", speculative_config=config)
            for config in (None, {**draft(width), "model": folder("llama3")})
        )
    ]
    assert answers[0] == answers[1]


def test_weights_read_ahead_are_those_of_the_file(monkeypatch):
    """Into memory that was in use a moment ago, and used at once, in parts that end within a tensor."""
    from flashtile.engine import upload
    from flashtile.engine.config import read_config
    from flashtile.engine.weights import open_weights, parameters

    monkeypatch.setattr(upload, "PART_BYTES", 2**12)
    monkeypatch.setattr(upload, "AHEAD_BYTES", 2**15)
    place = folder("llama3")
    config = read_config(place)
    cpu, cuda = (open_weights(place, config, torch.device(d), torch.float32) for d in ("cpu", "cuda"))
    torch.full((2**22,), torch.nan, device="cuda")
    for name in parameters(config):
        assert torch.equal(torch.cat([cuda(name)]).cpu(), cpu(name)), name


@pytest.mark.parametrize(("name", "cascade"), [("llama3", False), ("llama3", True), ("gemma2", True)])
def test_the_host_does_not_wait_where_the_batch_changes(name, cascade, monkeypatch):
    """Sampling parameters, biases and log-probabilities travel beside the steps, and so do groups."""
    let_all_be_grouped(monkeypatch)
    llm = load(
        name, device="cuda", dtype="float32", block_size=4, cascade_attention=cascade,
        max_num_batched_tokens=24, max_num_seqs=15,
    )  # fmt: skip
    params = [
        SamplingParams(
            seed=i, temperature=0.8, max_tokens=3 + 2 * i, logprobs=i % 2 or None, logit_bias={i: 1.0}
        )
        for i in range(5)
    ]  # fmt: skip
    expected = llm.generate(prompts(), params)  # compiles and captures
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = llm.generate(prompts(), params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [str(one.message) for one in caught if "synchron" in str(one.message)] == []
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.parametrize("eager", [False, True])
def test_structures_hold_in_batches_with_free_requests(tmp_path, eager):
    """The masks come from pinned memory, and the host does not wait for the device to take them."""
    pytest.importorskip("llguidance")
    llm = LLM(
        folder_with_pairs(tmp_path), load_format="dummy", device="cuda", dtype="bfloat16", warmup=False,
        enforce_eager=eager, kv_cache_memory_bytes=2**24,
    )  # fmt: skip
    pattern = "[ab]{5}(c|de){3,9}!"
    bound = [SamplingParams(structured_outputs={"regex": pattern}, max_tokens=40, seed=i) for i in range(40)]
    free = [SamplingParams(max_tokens=20, seed=i, top_p=0.9) for i in range(9)]
    found = llm.generate(["one"] * 49, bound + free)
    texts = [output.outputs[0].text for output in found]
    assert all(re.fullmatch(pattern, text) for text in texts[:40])
    assert len(set(texts[:40])) > 30
    expected = [llm.generate("one", one)[0].outputs[0] for one in (bound[3], free[3])]
    assert [one.token_ids for one in expected] == [found[i].outputs[0].token_ids for i in (3, 43)]
    logits = torch.randn(3, 410, device="cuda", dtype=torch.bfloat16)
    matcher = llm.engine.structures.matcher({"regex": "[ab]"}).deep_copy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked, _ = mask(logits, [(matcher, 1)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(masked[::2], logits[::2])
    assert masked[1].isfinite().sum() == 2


def on_a_card(rank: int, world: int, store: str, path: str, expected: list[list[int]]) -> None:
    os.environ |= {"WORLD_SIZE": str(world), "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    for guesses in (None, {"method": "ngram"}):
        llm = LLM(
            path, device=f"cuda:{rank}", dtype="float32", skip_tokenizer_init=True,
            tensor_parallel_size=world, speculative_config=guesses, kv_cache_memory_bytes=2**24, warmup=False,
        )  # fmt: skip
        outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.engine.runner.graphs  # the sums are in them
    check_sums(llm.engine.runner.ranks)
    llm.close()
    assert not llm.engine.runner.graphs
    again = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
    assert [output.outputs[0].token_ids for output in again] == expected
    dist.destroy_process_group()  # while the model and its graphs are there


def check_sums(ranks: ProcessRanks) -> None:
    """Sums that follow one another in a graph, as exact as in one rounding, while ranks are late in turns."""
    torch.manual_seed(0)
    summed, rights, wrong = [], [], torch.zeros((), dtype=torch.int64, device="cuda")
    for i, rows in enumerate((1, 1, 130, 7, 64, 1)):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[i % 3]
        parts = torch.randn(ranks.world, rows, 4096).to(dtype).cuda()
        residual = torch.randn(rows, 4096).to(dtype).cuda() if i % 2 else None
        summed.append((parts[ranks.rank].clone(), residual))
        total = parts.float().sum(0)
        rights.append((total if residual is None else total + residual.float()).to(dtype))

    def run() -> None:
        outs = [ranks.sum(*given) for given in summed]
        tokens = ranks.broadcast(torch.arange(5, device="cuda") + ranks.rank)
        wrong.add_((tokens != torch.arange(5, device="cuda")).sum())
        for out, right in zip(outs, rights, strict=True):
            wrong.add_((out != right).sum())
            out.fill_(torch.nan)
        for tensor in (*(t for given in summed for t in given if t is not None), *rights):
            tensor.neg_()  # what a call before has left would be seen

    replay = Capture(torch.device("cuda", torch.cuda.current_device()))(run)
    for i in range(100):
        if i % 10 == ranks.rank:
            torch.cuda._sleep(2_000_000)
        replay()
    assert int(wrong) == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_cards_answer_as_one_does(tmp_path):
    expected = greedy("llama3", LENGTH)
    arguments = (2, str(tmp_path / "store"), str(folder("llama3")), expected)
    torch.multiprocessing.spawn(on_a_card, arguments, nprocs=2)
