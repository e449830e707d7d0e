"""Faults of the engine: random requests, aborts, failed steps, threads, hostile model folders."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import struct
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_models import MODELS, SIZES, VOCABULARY, folder, greedy, load, prompts

from flashtile.engine import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ConfigError,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
    memory,
)
from flashtile.engine import llm as llm_module
from flashtile.engine.config import parse_config
from flashtile.engine.runner import NO_TOKEN
from flashtile.engine.scheduler import COPY, SchedulerOutput
from flashtile.engine.tokenizer import ByteTokenizer
from walk import walk

SMALL = {"num_gpu_blocks_override": 12, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}


def random_params(draw: random.Random):
    if draw.random() < 0.1:
        return BeamSearchParams(draw.randrange(1, 5), draw.randrange(1, 9))
    return SamplingParams(
        n=draw.choice([1, 1, 1, 2, 4]), temperature=draw.choice([0, 1]), max_tokens=draw.randrange(1, 12),
        top_p=draw.choice([1, 0.9]), logprobs=draw.choice([None, None, 2]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        presence_penalty=draw.choice([0, 0, 0, 1]), stop_token_ids=draw.choice([None, [3, 4, 5, 6, 7, 8]]),
        min_tokens=draw.choice([0, 1]), output_kind=draw.choice(list(RequestOutputKind)),
    )  # fmt: skip


def random_prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(4) for _ in range(draw.randrange(1, 20))]


SWAPPING = {"async_scheduling": True, "swap_space": 0.0005}


@pytest.mark.parametrize("options", [{}, SWAPPING, {"speculative_config": {"method": "ngram"}}])
@pytest.mark.parametrize("seed", [0])
def test_random_requests_all_end(seed, options):
    """Kinds, lengths and priorities at random in a small pool, bad ones among them; some are aborted."""
    draw = random.Random(seed)
    llm = load("llama3", **SMALL, **options)
    engine, manager = llm.engine, llm.engine.scheduler.manager
    taken, finished, refused = {}, Counter(), 0
    for number in range(60):
        prompt, request_id = random_prompt(draw), f"r{number}"
        if draw.random() < 0.1:
            prompt = draw.choice([[], [VOCABULARY], "text", [1] * 200, None])
        try:
            priority = draw.randrange(3)
            taken[request_id] = engine.add_request(request_id, prompt, random_params(draw), priority=priority)
        except (TypeError, ValueError):
            refused += 1
        outputs = []
        if draw.random() < 0.1 and engine.requests:
            outputs += engine.abort(draw.choice(list(engine.requests)))
        for _ in range(draw.randrange(4)):
            outputs += engine.step()
        finished.update(output.request_id for output in outputs if output.finished)
        manager.check_integrity()
    while engine.has_unfinished:
        finished.update(output.request_id for output in engine.step() if output.finished)
    assert set(finished) == set(taken)
    assert set(finished.values()) == {1}
    assert refused > 1
    assert manager.sequences == ()
    assert [engine.requests, engine._beams] == [{}] * 2
    sequences = [sequence for request in taken.values() for sequence in request.sequences]
    assert {(one.matcher, len(one.ngrams), one.detokenizer) for one in sequences} == {(None, 0, None)}
    assert llm.get_metrics().num_preemptions > 0
    (output,) = llm.generate(prompts()[0], SamplingParams(temperature=0, max_tokens=9))
    assert output.outputs[0].token_ids == greedy("llama3", 14)[0][:9]


def test_a_step_that_fails_ends_its_requests_and_no_other(monkeypatch):
    llm = load("llama3", async_scheduling=True)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=6)
    engine.add_request("a", prompts()[0], params)
    engine.step()
    hidden = engine.runner.model.hidden
    monkeypatch.setattr(engine.runner.model, "hidden", lambda *_: 1 / 0)
    (failed,) = engine.step()
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, "error")
    assert "ZeroDivisionError" in failed.outputs[0].stop_reason
    monkeypatch.setattr(engine.runner.model, "hidden", hidden)
    (output,) = llm.generate([prompts()[0]], params)
    assert output.num_cached_tokens == 0  # what the failed step computed is not found again
    assert output.outputs[0].token_ids == greedy("llama3", 14)[0][:6]
    assert engine.scheduler.manager.sequences == ()


class Panic(BaseException):
    """A panic of Rust code arrives as an exception that is no Exception."""


def panic(*_):
    raise Panic("index out of bounds")


KINDS = {
    "final": SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY),
    "delta": SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA),
    "stops": SamplingParams(temperature=0, max_tokens=6, stop=["no such text"]),
    "beams": BeamSearchParams(2, 6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_panic_of_the_tokenizer_ends_one_request(kind, overlaps, monkeypatch):
    """The other requests go on, and so does the engine."""
    llm = load("llama3", async_scheduling=overlaps)
    engine, others = llm.engine, SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    engine.tokenizer = ByteTokenizer()
    monkeypatch.setattr(engine.tokenizer, "stream", panic)
    engine.add_request("fails", prompts()[0], KINDS[kind])
    engine.add_request("goes on", prompts()[1], others)
    ends = {}
    while engine.has_unfinished:
        ends |= {output.request_id: output for output in engine.step() if output.finished}
    answer = ends["fails"].outputs[0]
    assert answer.finish_reason == "error"
    assert "Panic: index out of bounds" in answer.stop_reason
    assert ends["goes on"].outputs[0].token_ids == greedy("llama3", 14)[1][:6]
    assert engine.scheduler.manager.sequences == ()


def test_a_panic_of_a_step_ends_its_requests(monkeypatch):
    llm = load("llama3")
    llm.engine.add_request("a", prompts()[0], SamplingParams(temperature=0, max_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "hidden", panic)
        (failed,) = llm.engine.step()
    assert "Panic" in failed.outputs[0].stop_reason
    (output,) = llm.generate([prompts()[0]], SamplingParams(temperature=0, max_tokens=6))
    assert output.outputs[0].token_ids == greedy("llama3", 14)[0][:6]


def test_a_step_that_fails_ends_those_whose_memory_it_was_to_move(monkeypatch):
    """A sequence on its way to the host has no keys and values anywhere, where the copy was not made."""
    llm = load("llama3", num_gpu_blocks_override=7, block_size=4, swap_space=0.001, max_num_seqs=2)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=12)
    for name, length in (("a", 5), ("b", 6)):  # so that b has the last block when a wants one
        engine.add_request(name, prompts()[1][:length], params)
    monkeypatch.setattr(engine.runner, "_move", lambda *_: 1 / 0)
    while engine.has_unfinished:
        outputs = engine.step()
    assert engine.last_schedule.swapped
    assert {one.request_id: one.outputs[0].finish_reason for one in outputs} == {"a": "error", "b": "error"}
    assert (engine.requests, engine.scheduler.manager.sequences) == ({}, ())


NOT_A_NUMBER = float("nan")
BAD_LOGITS = [
    (NOT_A_NUMBER, SamplingParams(temperature=0, max_tokens=4)),
    (-NOT_A_NUMBER, SamplingParams(top_k=3, max_tokens=4)),  # what inf - inf is on a CPU: sorted, it is last
    (NOT_A_NUMBER, SamplingParams(top_p=0.5, min_p=0.1, max_tokens=4)),
    (float("inf"), SamplingParams(n=2, seed=1, max_tokens=4)),
    (NOT_A_NUMBER, SamplingParams(logprobs=2, allowed_token_ids=[1, 2], max_tokens=4)),
    (NOT_A_NUMBER, BeamSearchParams(2, 4)),
]


@walk(("value", "params"), BAD_LOGITS)
@walk("overlapped", [False, True])
def test_logits_that_are_not_finite_end_only_their_request(value, params, overlapped):
    """Of two rows of logits the first has a bad one, of token 9."""
    llm = load("llama3", async_scheduling=overlapped)
    engine, model = llm.engine, llm.engine.runner.model
    logits = model.logits

    def spoilt(hidden):
        found = logits(hidden)
        found[0, 9] = value
        return found

    model.logits = spoilt
    good = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("bad", prompts()[1], params)
    engine.add_request("good", prompts()[0], good)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one for one in engine.step()}
    assert {one.finish_reason for one in outputs["bad"].outputs} == {"error"}
    assert "NaN" in outputs["bad"].outputs[0].stop_reason
    assert all(one.token_ids == [] and not one.logprobs for one in outputs["bad"].outputs)
    assert outputs["good"].outputs[0].token_ids == greedy("llama3", 14)[0][:1]
    del model.logits
    (again,) = llm.generate([prompts()[1]], SamplingParams(temperature=0, max_tokens=6))
    assert again.num_cached_tokens == 0  # nor are its keys and values found again
    assert again.outputs[0].token_ids == greedy("llama3", 14)[1][:6]


def test_prompts_without_log_probabilities_end_with_an_error():
    llm = load("llama3")
    with torch.inference_mode():
        llm.engine.runner.model.embedding[7] = NOT_A_NUMBER
    params = SamplingParams(prompt_logprobs=1, max_tokens=2)
    bad, good = llm.generate([[1, 7, 3], [1, 2, 3]], params)
    assert (bad.outputs[0].finish_reason, bad.prompt_logprobs) == ("error", [None])
    assert good.outputs[0].finish_reason == "length"
    assert all(one.logprob <= 0 for entry in good.prompt_logprobs[1:] for one in entry.values())


def test_what_an_aborted_prompt_computed_is_not_told_of_its_successor():
    """The step in flight finds NaN for a request that was aborted, and whose id another request has."""
    engine = load("llama3", async_scheduling=True).engine
    with torch.inference_mode():
        engine.runner.model.embedding[7] = NOT_A_NUMBER
    engine.add_request("a", [1, 7, 3], SamplingParams(prompt_logprobs=1))
    engine.step()
    engine.abort("a")
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    found = []
    while engine.has_unfinished:
        found += [output.outputs[0].finish_reason for output in engine.step() if output.finished]
    assert found == ["length"]


def test_a_request_that_allows_no_token_ends_with_an_error():
    """Nothing is wrong with the model, so other requests still find their prompts in the prefix cache."""
    llm = load("llama3")
    plain = SamplingParams(temperature=0, max_tokens=6)
    expected = llm.generate([prompts()[1]], plain)[0].outputs[0].token_ids
    params = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)
    (output,) = llm.generate([[1, 2]], params)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert output.outputs[0].stop_reason == NO_TOKEN
    (again,) = llm.generate([prompts()[1]], plain)
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_exclude_every_token_are_told_from_bad_logits(temperature):
    llm = load("llama3")

    def exclude(tokens, logits):
        return logits.fill_(-torch.inf)

    params = SamplingParams(temperature=temperature, top_p=0.9, logits_processors=[exclude])
    (output,) = llm.generate([[1, 2]], params)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", NO_TOKEN)


def test_a_request_that_other_processes_cannot_be_told_of_is_not_taken():
    llm = load("llama3")

    def tell(*change):
        raise AttributeError("cannot be pickled")

    llm.engine.on_change = tell
    with pytest.raises(AttributeError):
        llm.engine.add_request("a", [1], SamplingParams())
    assert not llm.engine.has_unfinished
    assert not llm.engine.scheduler.waiting


def serve(work, **options):
    """What ``work`` gives for an engine in its thread, which is shut down after it."""
    llm = load("llama3", **options)

    async def run():
        server = AsyncLLM(llm.engine)
        try:
            return await asyncio.wait_for(work(server), 60)
        finally:
            await server.shutdown(1)

    result = asyncio.run(run())
    assert llm.engine.scheduler.manager.sequences == ()
    return result


def test_a_panic_of_a_tokenizer_does_not_end_the_engine():
    """Rust code raises a BaseException that is no Exception."""

    class Panic(BaseException):
        pass

    def encode(text):
        raise Panic

    async def work(server):
        server.engine.tokenizer = SimpleNamespace(encode=encode)
        with pytest.raises(Panic):
            await server.add_request("text", "a", SamplingParams(detokenize=False))
        stream = await server.add_request("tokens", [1], SamplingParams(max_tokens=2, detokenize=False))
        return [output async for output in stream]

    assert len(serve(work)[-1].outputs[0].token_ids) == 2


@pytest.mark.parametrize("overlapped", [False, True])
def test_many_tasks_get_their_own_answers(overlapped):
    params = SamplingParams(temperature=0, max_tokens=14, output_kind=RequestOutputKind.DELTA)

    async def one(server, i):
        tokens = []
        async for output in server.generate(prompts()[i % 5], params, f"r{i}"):
            tokens += output.outputs[0].token_ids
        return tokens

    async def work(server):
        return await asyncio.gather(*(one(server, i) for i in range(15)))

    assert serve(work, **SMALL, async_scheduling=overlapped) == greedy("llama3", 14) * 3


def test_a_client_that_stops_reading_aborts_its_request():
    async def work(server):
        params = SamplingParams(max_tokens=100, seed=1)
        async for output in server.generate(prompts()[0], params, "left"):
            assert not output.finished
            break
        reader = asyncio.create_task(anext(server.generate(prompts()[1], params, "cancelled")))
        await asyncio.sleep(0)
        reader.cancel()
        stream = await server.add_request("aborted", prompts()[2], params)
        await server.abort("aborted")
        last = [output async for output in stream][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        for _ in range(2000):
            if not await server.call(lambda engine: engine.requests):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("requests are left")

    serve(work)


def test_refusals_shutdown_and_death_reach_every_task():
    async def work(server):
        with pytest.raises(ValueError, match="token 0 of prompt must be from 0"):
            await server.add_request("bad", [VOCABULARY], SamplingParams())
        await server.add_request("same", [1], SamplingParams(max_tokens=100))
        with pytest.raises(ValueError, match="request_id must be new"):
            await server.add_request("same", [1], SamplingParams())
        streams = [
            await server.add_request(f"r{i}", prompts()[i], SamplingParams(max_tokens=90)) for i in range(3)
        ]
        await server.shutdown(0)
        for stream in streams:
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert not server.is_alive
        with pytest.raises(EngineDeadError):
            await server.add_request("late", [1], SamplingParams())
        with pytest.raises(EngineDeadError):
            await server.abort("late")

    serve(work)

    async def dying(server):
        stream = await server.add_request("a", prompts()[0], SamplingParams(max_tokens=100))
        server.engine.scheduler.schedule = lambda: 1 / 0
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            [output async for output in stream]
        assert not server.is_alive
        server.engine.abort(list(server.engine.requests))

    serve(dying)


CONFIG = {**SIZES, "model_type": "llama"}


@walk(
    ("change", "error", "message"),
    [
        ({"model_type": "mamba"}, NotImplementedError, "model_type must be one of llama"),
        ({"model_type": ["llama"]}, NotImplementedError, "model_type must be one of"),
        ({"hidden_size": None}, ConfigError, "hidden_size must be an integer from 1"),
        ({"hidden_size": -64}, ConfigError, "hidden_size must be an integer from 1"),
        ({"hidden_size": 2**40}, ConfigError, "hidden_size must be an integer from 1"),
        ({"hidden_size": True}, ConfigError, "hidden_size must be an integer"),
        ({"num_hidden_layers": "2"}, ConfigError, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, ConfigError, "num_attention_heads must be a multiple"),
        ({"head_dim": 7}, ConfigError, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "relu"}, NotImplementedError, "hidden_act must be one of silu"),
        ({"hidden_act": ["silu"]}, NotImplementedError, "hidden_act must be one of silu"),
        ({"rope_scaling": {"type": "3d"}}, NotImplementedError, "rope_type must be one of"),
        ({"rope_scaling": {"type": "longrope"}}, ConfigError, "short_factor must be a list of 8 positive"),
        ({"rope_scaling": {"type": "linear"}}, ConfigError, "factor must be a positive number"),
        ({"rope_scaling": [1]}, ConfigError, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor must be 1"),
        ({"eos_token_id": [5, 900]}, ConfigError, "eos_token_id must be a token or a list"),
        ({"quantization_config": {"quant_method": "gptq"}}, NotImplementedError, "got 'gptq'; vLLM serves"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, NotImplementedError, "vision_config is not"),
        ({"architectures": ["Qwen3Model"]}, NotImplementedError, "not embeddings or classes, got"),
        ({"model_type": "mistral", "sliding_window": 0}, ConfigError, "sliding_window must be an integer"),
        (
            {"model_type": "gemma2", "sliding_window": 4, "layer_types": ["x"]},
            ConfigError,
            "layer_types must be",
        ),
        ({"dtype": "int8"}, NotImplementedError, "dtype must be float16"),
        ({"attention_bias": "yes"}, ConfigError, "attention_bias must be true or false"),
    ],
)
def test_invalid_and_unsupported_configs_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        parse_config({**CONFIG, **change})


def test_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotImplementedError, match="has a LoRA adapter: merge it"):
        LLM(tmp_path, device="cpu")
    with pytest.raises(
        NotImplementedError, match=r"lora_request is not supported, got 'adapter': merge the adapter"
    ):
        load("llama3").generate([[1]], lora_request="adapter")


def test_old_and_new_ways_to_write_a_config():
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    rope = {"rope_type": "linear", "rope_theta": 500, "factor": 2}
    new = {"rope_parameters": rope, "dtype": "float16"}
    assert parse_config({**CONFIG, **old}) == parse_config({**CONFIG, **new})
    gemma = {**SIZES, **MODELS["gemma2"], "num_hidden_layers": 4}
    assert parse_config(gemma).windows == (5, -1, 5, -1)
    assert parse_config({**SIZES, **MODELS["qwen2"]}).windows == (-1, 8)
    assert parse_config({**gemma, "layer_types": ["full_attention"] * 4}).windows == (-1,) * 4
    assert parse_config({**CONFIG, "eos_token_id": [1, 2]}).eos_token_ids == (1, 2)


def test_how_long_a_sequence_a_models_positions_serve():
    """Scaled ones may reach further than ``max_position_embeddings`` says."""
    plain = parse_config(CONFIG)
    assert plain.longest_sequence == plain.max_position_embeddings == 128
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_config({**CONFIG, **linear}).longest_sequence == 256
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    assert parse_config({**CONFIG, "rope_scaling": yarn}).longest_sequence == 512
    assert parse_config({**CONFIG, "rope_scaling": {**yarn, "factor": 1.5}}).longest_sequence == 128


def header(entries: object, size: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x80\x04pickle", "not a safetensors file"),
        (header({}, size=2**62), "not a safetensors file"),
        (
            header({"model.norm.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}),
            "not a safetensors file",
        ),
        (header({"evil": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4, "'evil'"),
        (
            header({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
            r"model.norm.weight must have shape \(64,\)",
        ),
        (
            header({"model.norm.weight": {"dtype": "I32", "shape": [64], "data_offsets": [0, 256]}})
            + b"\0" * 256,
            "must be one of F16, BF16, F32, got I32",
        ),
        (header({}), "has no weight 'model.embed_tokens.weight'"),
    ],
)
def test_hostile_weights_are_refused(tmp_path, content, message):
    shutil.copy(folder("llama3") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True)


def test_folders_that_lack_something_or_point_elsewhere_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path, device="cpu")
    shutil.copy(folder("llama3") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        LLM(tmp_path, device="cpu")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="they may run code"):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../../etc/passwd"}}))
    with pytest.raises(ConfigError, match="files of this folder"):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True)
    index.write_text("[" * 100000)
    with pytest.raises(ConfigError, match="is not JSON"):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True)


@walk(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size must be the number of processes \(1\), got 2"),
        ({"quantization": "awq"}, "quantization must be None or"),
        ({"quantization": "fp8"}, "dtype must be bfloat16 or float16 with quantization"),
        ({"speculative_config": {"method": "eagle"}}, "must have the method 'ngram'"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "must have only fields of ngram"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "must be from 1 to 62"),
        ({"load_format": "pt"}, "load_format must be auto"),
        ({"dtype": "int8"}, "dtype must be one of auto"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide the model's num_heads=4, got 3"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto"),
        ({"max_model_len": 0}, "max_model_len must be from 1"),
        ({"max_model_len": 1 << 20}, "max_model_len must be from 1 to"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens must be at least"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes must hold two blocks"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be from 2"),
        ({"swap_space": -1}, "swap_space must be at least 0"),
        ({"swap_space": float("inf")}, "swap_space must be at least 0"),
        ({"swap_space": "4"}, "swap_space must be a number"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"kv_cache_memory_bytes": "1G"}, "kv_cache_memory_bytes must be an int"),
        *(
            ({name: "no"}, f"{name} must be True or False")
            for name in ("enable_prefix_caching", "enforce_eager", "warmup")
        ),
        ({"kv_cache_dtype": ["fp8"]}, "kv_cache_dtype must be one of auto"),
        ({"speculative_config": "ngram"}, "speculative_config must be a dict"),
        ({"device": "tpu"}, "device must be cuda"),
        *(
            ({name: np.ones(2)}, f"{name} must ")
            for name in ("quantization", "load_format", "dtype", "kv_cache_dtype", "device")
        ),
        ({"speculative_config": {"method": np.ones(2)}}, "must have the method 'ngram'"),
    ],
)
def test_options_of_the_engine_are_refused_by_name(options, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        load("llama3", **options)


def test_a_model_of_very_many_positions_takes_what_is_used(tmp_path):
    """Tables of all positions would take gigabytes and most of a minute."""
    config = {**SIZES, **MODELS["llama2"], "max_position_embeddings": 2**24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 2}
    llm = LLM(tmp_path, kv_cache_memory_bytes=2**20, **options)
    runner = llm.engine.runner
    tokens = 2**20 // (2 * 2 * 4 * 16 * 4)  # of keys and values, by layer, head and dimension, in float32
    assert llm.engine.max_model_len == len(runner.model.rotary[0]) == tokens
    assert runner.block_table.shape == (3, tokens // 16)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, stop_token_ids=list(range(120)))
    assert llm.generate([[1, 2]], params)[0].outputs[0].finish_reason == "stop"
    with pytest.raises(
        ValueError, match=f"shorter than max_model_len={tokens} tokens.*maximum context length"
    ):
        llm.generate([[1] * tokens])
    assert LLM(tmp_path, max_model_len=99, **options).engine.max_model_len == 99
    config |= {"model_type": "mistral", "sliding_window": 4, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))  # whose memory does not grow with the length
    llm = LLM(tmp_path, kv_cache_memory_bytes=2**22, **{**options, "block_size": 1024})
    assert llm.engine.max_model_len == 2**20


def test_memory_of_the_tables_is_not_the_caches(monkeypatch):
    """On a GPU; here it is not measured."""
    monkeypatch.setattr(llm_module, "memory_left", lambda *_: 2**18)
    llm = load("llama3", block_size=4, max_num_seqs=8, max_model_len=64)
    runner, options = llm.engine.runner, (64, 8, 4)
    on_gpu = SimpleNamespace(embedding=torch.empty(0, device="meta"), config=llm.model_config)
    tables = sum(table.nbytes for table in runner.model.rotary) + runner.block_table.nbytes
    assert memory.bytes_of_tables(on_gpu, *options, 2**18) == tables
    assert memory.bytes_of_tables(on_gpu, *options, 8) == tables // 2  # no longer than the cache
    assert memory.bytes_of_tables(runner.model, *options, 2**18) == 0
    left = 2**18 - tables
    monkeypatch.setattr(llm_module, "bytes_of_tables", lambda *_: tables)
    pool = load("llama3", block_size=4, max_num_seqs=8, max_model_len=64).engine.scheduler.manager.pool
    assert pool.num_blocks == left // memory.bytes_of_block(runner.model, 4, torch.float32)
    assert pool.num_blocks < llm.engine.scheduler.manager.pool.num_blocks


def test_more_changes_of_the_block_table_than_a_step_has_room_for(monkeypatch):
    monkeypatch.setattr("flashtile.engine.runner.MAX_CHANGES", 2)
    llm = load("llama3", block_size=4)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=6))
    assert [one.outputs[0].token_ids for one in outputs] == [one[:6] for one in greedy("llama3", 14)]


def test_dummy_weights_need_a_config_alone(tmp_path):
    shutil.copy(folder("gpt_oss") / "config.json", tmp_path)
    first, second, other = (
        LLM(tmp_path, device="cpu", load_format="dummy", skip_tokenizer_init=True, seed=seed)
        for seed in (1, 1, 2)
    )
    params = SamplingParams(temperature=0, max_tokens=5)
    answers = [llm.generate([1, 2, 3], params)[0].outputs[0].token_ids for llm in (first, second, other)]
    assert answers[0] == answers[1] != answers[2]
    assert torch.isfinite(first.engine.runner.memory.k).all()


def test_blocks_are_moved_in_a_step_without_tokens():
    runner = load("llama3", block_size=4).engine.runner
    runner.memory.k[:, 1], runner.memory.v[:, 1] = 1.0, 2.0
    in_flight = runner.launch(SchedulerOutput([], moves=[(COPY, [(1, 2)])]))
    assert (in_flight.samples, in_flight.tokens.tolist()) == ([], [])
    assert bool((runner.memory.k[:, 2] == 1).all() and (runner.memory.v[:, 2] == 2).all())
