"""What a trainer needs of the engine between its steps: other weights, and memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from engine_models import folder, load, prompts, transformers_model
from safetensors.torch import load_file

from flashtile.engine import LLM, SamplingParams
from flashtile.engine.weights import given_weights

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
NAMES = ["llama2", "gemma3", "olmo2", "qwen3_moe", "gpt_oss"]
"""Tied and own heads, norms of every kind, biases, sinks, separate and stacked experts."""


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    outputs = [output.outputs[0] for output in llm.generate(prompts(), PARAMS)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


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
    for given, error, words in (
        (others, ValueError, f"none for '{norm}' .1 of"),
        ({**good, "model.norm.bias": good[norm]}, ValueError, "weights of llama, got 'model.norm.bias'"),
        ({**good, norm: good[norm][1:]}, ValueError, r"shape \(64,\) for 'model.norm.weight', got \(63,\)"),
        ({**good, norm: good[norm].int()}, TypeError, "floating-point tensors, got torch.int32"),
        ({**good, norm: [1.0] * 64}, TypeError, "floating-point tensors, got list"),
        ([*good.items(), (norm, good[norm])], ValueError, f"once, got '{norm}' twice"),
        (None, TypeError, "named_tensors must be a dict or .name, tensor. pairs, got None"),
        ([norm], TypeError, "named_tensors must be a dict or .name, tensor. pairs, got 'model.norm"),
        (folder("qwen3"), ValueError, "weight that llama does not have"),
        ("no such folder", FileNotFoundError, "no such folder"),
    ):  # fmt: skip
        with subtests.test(words), pytest.raises(error, match=words):
            llm.update_weights(given)
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
    with pytest.raises(ValueError, match="wake_up must be called before requests"):
        answers(llm)
    with pytest.raises(ValueError, match="wake_up must be called before update_weights"):
        llm.update_weights(weights_of(name))
    llm.wake_up(["weights"])
    assert memory.k.untyped_storage().nbytes() == 0
    if level == 2:
        llm.update_weights(weights_of(name))
    with pytest.raises(ValueError, match="wake_up must be called before requests"):
        answers(llm)
    llm.wake_up()
    assert answers(llm) == expected


def test_a_draft_model_sleeps_as_well():
    config = {"model": folder("llama2"), "num_speculative_tokens": 3}
    llm = load("llama3", block_size=4, speculative_config=config)
    expected = answers(llm)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(ValueError, match=r"update_weights, after sleep\(level=2\), must be called"):
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
    with pytest.raises(ValueError, match="wake_up must be called before sleep"):
        llm.sleep()
    for tags in ("weights", ["cache"], [1]):
        with pytest.raises(ValueError, match=r"tags must be a list"):
            llm.wake_up(tags)
