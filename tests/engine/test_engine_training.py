"""What a trainer needs of the engine between its steps: other weights, and memory."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest
import torch
from engine_models import folder, load, prompts, transformers_model
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtile.engine import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
)
from flashtile.engine import model as model_module
from flashtile.engine import runner as runner_module
from flashtile.engine.weights import given_weights

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
NAMES = ["llama2", "gemma3", "olmo2", "qwen3_moe", "gpt_oss"]
"""Tied and own heads, norms of every kind, biases, sinks, separate and stacked experts."""


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    outputs = [output.outputs[0] for output in llm.generate(prompts(), PARAMS)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def with_attribute(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor with an attribute of a DTensor's."""
    found = tensor.clone()
    setattr(found, name, None)
    return found


def without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has a device, but only pretends to be there, as in a trial of a program."""
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As a parameter that FSDP has gathered and freed again."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


def weights_of(name: str) -> dict[str, torch.Tensor]:
    (path,) = folder(name).glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_with_new_weights_answers_as_a_new_engine(name):
    """They are in the memory of the old ones, and blocks with keys of the old weights are not found."""
    llm = load(name, load_format="dummy", block_size=4)
    model = llm.engine.runner.model
    tensors = model.embedding, model.head.weight, model.layers[0].attention.qkv.weight
    places, before = [tensor.data_ptr() for tensor in tensors], answers(llm)
    llm.update_weights(weights_of(name))
    found = answers(llm)
    assert found == answers(load(name, block_size=4))
    assert found != before
    tensors = model.embedding, model.head.weight, model.layers[0].attention.qkv.weight
    assert [tensor.data_ptr() for tensor in tensors] == places


@pytest.mark.parametrize(
    "kind", [folder, lambda name: transformers_model(name).named_parameters()], ids=["folder", "parameters"]
)
def test_rounded_weights_are_updated(kind):
    options = {"dtype": "bfloat16", "quantization": "fp8", "block_size": 4}
    llm = load("llama3", load_format="dummy", **options)
    llm.update_weights(kind("llama3"))
    assert answers(llm) == answers(load("llama3", **options))


def test_wrong_weights_are_refused_before_anything_changes(subtests):
    llm, good = load("llama3", block_size=4), weights_of("llama3")
    expected, norm = answers(llm), "model.norm.weight"
    others = {name: tensor for name, tensor in good.items() if name != norm}
    nested = torch.nested.nested_tensor([good[norm]], layout=torch.jagged)
    for given, error, words in (
        (others, ValueError, f"none for '{norm}' .1 of {len(good)} are missing"),
        ({}, ValueError, f"none for 'model.embed_tokens.weight' .{len(good)} of {len(good)} are missing"),
        ({**good, "model.norm.bias": good[norm]}, ValueError, "weights of llama, got 'model.norm.bias'"),
        ({**good, norm: good[norm][1:]}, ValueError, r"shape \(64,\) for 'model.norm.weight', got \(63,\)"),
        ({**good, norm: good[norm].int()}, TypeError, "floating-point tensors, got torch.int32"),
        ({**good, norm: [1.0] * 64}, TypeError, "floating-point tensors, got list"),
        ([*good.items(), (norm, good[norm])], ValueError, f"once, got '{norm}' twice"),
        ({**good, norm: with_attribute(good[norm], "full_tensor")}, TypeError, f"call {norm}.full_tensor"),
        ({**good, norm: good[norm].to("meta")}, ValueError, f"have memory, got none for '{norm}' .meta"),
        ({**good, norm: without_numbers(good[norm])}, ValueError, f"memory, got none for '{norm}' .meta"),
        ({**good, norm: without_memory(good[norm])}, ValueError, f"have memory, got none for '{norm}' .cpu"),
        ({**good, norm: good[norm].to_sparse()}, TypeError, "dense tensors, got torch.sparse_coo"),
        ({**good, norm: nested}, TypeError, "dense tensors, got a nested tensor"),
        ({**good, norm: good[norm].cfloat()}, TypeError, "floating-point tensors, got torch.complex64"),
        ({**good, norm: llm.engine.runner.model.norm.weight}, ValueError, f"got '{norm}': clone it"),
        (transformers_model("llama3"), TypeError, r"the module LlamaForCausalLM: pass its state_dict\(\)"),
        (None, TypeError, "named_tensors must be a dict or .name, tensor. pairs, got NoneType"),
        ([norm], TypeError, "named_tensors must be a dict or .name, tensor. pairs, got str as item 0"),
        ([good[norm]], TypeError, "pairs, got Tensor as item 0"),
        (folder("qwen3"), ValueError, "weight that llama does not have"),
        ("no such folder", FileNotFoundError, "no such folder"),
    ):  # fmt: skip
        with subtests.test(words), pytest.raises(error, match=words) as caught:
            llm.update_weights(given)
        assert "\n" not in str(caught.value)
        llm.reset_prefix_cache()
        assert answers(llm) == expected
    config = replace(llm.model_config, scales="row")
    with pytest.raises(NotImplementedError, match="named_tensors must be a folder"):
        given_weights(good, config, llm.device, llm.dtype)
    llm.enqueue(prompts()[0], PARAMS)
    with pytest.raises(ValueError, match="without unfinished requests"):
        llm.update_weights(good)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_slept_answers_as_before(name, level):
    llm = load(name, block_size=4)
    model, memory = llm.engine.runner.model, llm.engine.runner.memory
    expected = answers(llm)
    places = {tensor.untyped_storage().data_ptr() for tensor in (*model.weights, memory.k, memory.v)}
    llm.sleep(level)
    held = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]
    if level == 2:  # no copies on the host, which may get the memory that was freed
        assert not places & {one.untyped_storage().data_ptr() for one in held}
    assert sum(tensor.untyped_storage().nbytes() for tensor in (*model.weights, memory.k, memory.v)) == 0
    with pytest.raises(ValueError, match="the engine must be awake for requests"):
        answers(llm)
    with pytest.raises(ValueError, match="awake for update_weights, but its memory of weights is freed"):
        llm.update_weights(weights_of(name))
    llm.wake_up(["weights"])
    assert memory.k.untyped_storage().nbytes() == 0
    if level == 2:
        llm.update_weights(weights_of(name))
    with pytest.raises(ValueError, match="the engine must be awake for requests"):
        answers(llm)
    llm.wake_up()
    assert answers(llm) == expected


def test_a_draft_model_sleeps_as_well():
    config = {"model": folder("llama2"), "num_speculative_tokens": 3}
    llm = load("llama3", block_size=4, speculative_config=config)
    expected = answers(llm)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(ValueError, match="the engine must have weights for requests"):
        answers(llm)
    llm.update_weights(folder("llama3"))
    guessed = llm.engine.num_guessed_tokens
    assert answers(llm) == expected
    assert llm.engine.num_guessed_tokens == 2 * guessed


def test_sleep_is_refused_in_the_wrong_moment():
    llm = load("llama3", block_size=4)
    llm.wake_up()  # it is awake
    for tags in ("weights", ["x"], 3):
        with pytest.raises(ValueError, match="tags must be a list of 'weights' and 'kv_cache' or None, got"):
            llm.wake_up(tags)
    for level in (0, 3):
        with pytest.raises(ValueError, match=f"level must be from 1 to 2, got {level}"):
            llm.sleep(level)
    llm.enqueue(prompts()[0], PARAMS)
    with pytest.raises(ValueError, match="without unfinished requests"):
        llm.sleep()
    llm.wait_for_completion()
    llm.sleep()
    with pytest.raises(ValueError, match="awake for sleep, but its memory of weights and kv_cache is freed"):
        llm.sleep()
    for tags in ("weights", ["cache"], [1]):
        with pytest.raises(ValueError, match=r"tags must be a list"):
            llm.wake_up(tags)


def test_a_buffer_that_is_filled_again_for_each_weight_is_refused():
    """All weights are read after the last one is given, so each would have the values of a later one."""
    llm, given = load("llama3", block_size=4, batch_invariant=True), weights_of("llama3")
    expected = answers(llm)
    buffer = torch.empty(max(tensor.numel() for tensor in given.values()))

    def one_buffer():
        for name, tensor in given.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def parts_of_a_buffer():
        own = torch.empty(sum(tensor.numel() for tensor in given.values()))
        parts = own.split([tensor.numel() for tensor in given.values()])
        for part, (name, tensor) in zip(parts, given.items(), strict=True):
            yield name, part.view(tensor.shape).copy_(tensor)

    with pytest.raises(ValueError, match="must keep their values, but the memory of"):
        llm.update_weights(one_buffer())
    assert answers(llm) == expected
    llm.update_weights(parts_of_a_buffer())
    assert answers(llm) == expected


def test_an_answer_that_ended_early_leaves_nothing_unfinished():
    """With steps that overlap, the next step was launched before the token that ends the answer was read."""
    # A product of the CPU may have other bits where memory is allocated again, unless it is invariant.
    llm = load("llama3", block_size=4, async_scheduling=True, batch_invariant=True)
    (output,) = llm.generate(prompts()[0], PARAMS)
    ends = replace(PARAMS, stop_token_ids=[output.outputs[0].token_ids[2]])
    for change in (lambda: llm.update_weights(folder("llama3")), llm.sleep):
        llm.generate(prompts()[0], ends)
        assert llm.engine.has_unfinished, "no step is in flight: the test shows nothing"
        change()
        llm.wake_up()
        assert llm.generate(prompts()[0], PARAMS)[0].outputs == output.outputs


def test_weights_that_fail_half_way_are_not_used(monkeypatch):
    llm, good = load("llama3", block_size=4), weights_of("llama3")
    expected = answers(llm)
    changed = {name: tensor + 1 for name, tensor in good.items()}

    def full(part, new):
        raise MemoryError("the device is full")

    monkeypatch.setattr(model_module, "overwrite", full)
    with pytest.raises(MemoryError):
        llm.update_weights(changed)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"must have weights for requests, .* call update_weights first"):
        answers(llm)
    llm.update_weights(good)
    assert answers(llm) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"num_gpu_blocks_override": 32, "swap_space": 1, "max_model_len": 64},
    ],
    ids=["whole", "chunks", "guesses", "swapped"],
)
def test_running_requests_give_up_their_keys(options):
    """All keys are wrong after the reset, as after a change of the weights, and answers stay the same."""
    llm = load("llama3", block_size=4, batch_invariant=True, **options)
    fixed = {"max_tokens": 20, "ignore_eos": True, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}
    params = [SamplingParams(n=n, seed=n, **fixed) for n in (3, 4, 2, 1)]
    params.insert(0, BeamSearchParams(beam_width=3, max_tokens=8))
    expected = [output.outputs for output in llm.generate(prompts(), params)]
    memory = llm.engine.runner.memory
    for steps in (1, 2, 3, 9):
        llm.reset_prefix_cache()
        for i, prompt in enumerate(prompts()):
            llm.engine.add_request(str(i), prompt, params[i])
        outputs = [output for _ in range(steps) for output in llm.engine.step()]
        assert llm.reset_prefix_cache(reset_running_requests=True)
        before = llm.get_metrics().num_preemptions
        memory.k.fill_(torch.nan)
        while llm.engine.has_unfinished:
            outputs += llm.engine.step()
        assert llm.get_metrics().num_preemptions > before
        found = {output.request_id: output.outputs for output in outputs if output.finished}
        assert [found[str(i)] for i in range(len(params))] == expected


def test_weights_that_were_dropped_stay_dropped():
    llm = load("llama3", block_size=4)
    llm.sleep(2)
    llm.wake_up()
    llm.sleep(1)
    llm.wake_up()
    with pytest.raises(ValueError, match="the engine must have weights for requests"):
        answers(llm)


@pytest.mark.parametrize("failing", [1, 3, 9])
def test_an_engine_wakes_up_when_there_is_memory_again(failing, monkeypatch):
    """Which allocation fails first: one of the cache, or of the weights of one of two models."""
    config = {"model": folder("llama2"), "num_speculative_tokens": 3}
    llm = load("llama3", block_size=4, speculative_config=config)
    expected, zeros, calls = answers(llm), torch.zeros, []
    llm.sleep()

    def full(*args, **options):
        calls.append(args)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("full")
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        llm.wake_up()
    with pytest.raises(ValueError, match=r"must be awake for requests, .*: call wake_up first"):
        answers(llm)
    llm.wake_up()
    assert answers(llm) == expected


@pytest.mark.parametrize("failing", [2, 3])
def test_an_engine_that_cannot_keep_its_weights_wakes_up(failing, monkeypatch):
    config = {"model": folder("llama2"), "num_speculative_tokens": 3}
    llm = load("llama3", block_size=4, speculative_config=config)
    expected, freed, calls = answers(llm), runner_module.Freed, []

    def full(*args):
        calls.append(args)
        if len(calls) == failing:
            raise MemoryError("the host is full")
        return freed(*args)

    monkeypatch.setattr(runner_module, "Freed", full)
    with pytest.raises(MemoryError):
        llm.sleep()
    llm.wake_up()
    assert answers(llm) == expected


def test_a_head_of_its_own_is_refused_where_embeddings_are_tied(tmp_path):
    """It would be ignored."""
    llm, weights = load("llama2", block_size=4), weights_of("llama2")
    expected, head, embedding = answers(llm), "lm_head.weight", weights["model.embed_tokens.weight"]
    (tmp_path / "config.json").write_bytes((folder("llama2") / "config.json").read_bytes())
    save_file({**weights, head: embedding + 1}, tmp_path / "model.safetensors")
    for given in ({**weights, head: embedding + 1}, tmp_path):
        with pytest.raises(
            ValueError, match=r"must have the embedding as lm_head\.weight of tied embeddings"
        ):
            llm.update_weights(given)
        llm.reset_prefix_cache()
        assert answers(llm) == expected
    with pytest.raises(ValueError, match=r"shape \(120, 64\) for 'lm_head.weight', got \(120, 63\)"):
        llm.update_weights({**weights, head: embedding[:, 1:]})
    llm.update_weights({**weights, head: embedding.clone()})
    assert answers(llm) == expected


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_engine_in_its_thread_is_changed_between_requests(overlapped):
    expected, other = (load("llama3", block_size=4, load_format=kind) for kind in ("auto", "dummy"))
    llm = load("llama3", block_size=4, load_format="dummy", async_scheduling=overlapped)
    prompt, params = prompts()[1], SamplingParams(temperature=0, max_tokens=100)

    async def answer(server: AsyncLLM) -> list[int]:
        return [output async for output in server.generate(prompt, PARAMS, "one")][-1].outputs[0].token_ids

    async def work() -> None:
        server = AsyncLLM(llm.engine)
        assert await answer(server) == other.generate(prompt, PARAMS)[0].outputs[0].token_ids
        stream = await server.add_request("long", prompt, params)
        for change in (server.sleep(), server.update_weights(folder("llama3"))):
            with pytest.raises(ValueError, match="must be called without unfinished requests, got 1 of them"):
                await change
        assert await server.reset_prefix_cache(reset_connector=False)
        await server.abort("long")
        assert [output async for output in stream][-1].finished
        await server.sleep(2, mode="abort")
        assert await server.is_sleeping()
        with pytest.raises(ValueError, match="the engine must be awake for requests"):
            await answer(server)
        await server.wake_up(["weights"])
        assert await server.is_sleeping()
        await server.update_weights(weights_of("llama3"))
        await server.wake_up()
        assert not await server.is_sleeping()
        assert await answer(server) == expected.generate(prompt, PARAMS)[0].outputs[0].token_ids
        assert await server.score(prompt, "score") == expected.score(prompt)[0]
        with pytest.raises(ValueError, match="prompt must have 2 to max_model_len=128 tokens"):
            await server.score([1], "short")
        await server.shutdown(0)
        with pytest.raises(EngineDeadError):
            await server.sleep()

    asyncio.run(asyncio.wait_for(work(), 60))
