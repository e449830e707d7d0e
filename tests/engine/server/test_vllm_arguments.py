"""Arguments of vLLM: taken where they change nothing, refused by name elsewhere; one table for all doors."""

from __future__ import annotations

import copy
import inspect
import json
import re
import unittest.mock
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile import LLM, SamplingParams
from flashtile.checks.vllm_arguments import (
    CALL_ARGUMENTS,
    LLM_ARGUMENTS,
    NO_METHODS,
    SAMPLING_ARGUMENTS,
    SERVE_ARGUMENTS,
    check_argument,
)
from flashtile.cli import application
from flashtile.engine import BeamSearchParams, StructuredOutputsParams
from flashtile.engine.server.errors import ApiError
from flashtile.engine.server.protocol import Body
from flashtile.tools.commands.serve import SHORT_OPTIONS, serve
from walk import walk

APPLICATION = application()
RECORD = json.loads(Path(__file__).with_name("vllm_arguments.json").read_text())
"""Names and defaults of vLLM's arguments by release (``scripts/record_vllm_arguments.py``)."""
COMPUTED = "<computed>"
OTHER_DEFAULTS = {"allowed_origins", "enable_auto_tool_choice"}
"""Options of ``vllm serve`` whose default here is another: no origin, and tools are called."""


def recorded(constructor):
    """(release, name, default) of each argument of a constructor or of the command."""
    return [(release, *item) for release, found in RECORD.items() for item in found[constructor].items()]


def test_no_argument_is_in_two_places():
    own = set(inspect.signature(LLM).parameters)
    assert not LLM_ARGUMENTS.keys() & own
    assert not SERVE_ARGUMENTS.keys() & own
    assert not SERVE_ARGUMENTS.keys() & set(inspect.signature(serve).parameters)
    assert not SAMPLING_ARGUMENTS.keys() & set(inspect.signature(SamplingParams).parameters)


@walk("name", LLM_ARGUMENTS)
def test_a_model_takes_neutral_values_and_refuses_others(name, tmp_path):
    neutral = LLM_ARGUMENTS[name].neutral
    for value in ("odd",) if neutral is None else neutral:
        with pytest.raises(FileNotFoundError):  # the folder is read after the arguments
            LLM(tmp_path, **{name: value})
    if neutral is not None:
        with pytest.raises(NotImplementedError, match=rf"^{name} .*got 'odd': "):
            LLM(tmp_path, **{name: "odd"})


@walk("name", SAMPLING_ARGUMENTS)
def test_parameters_take_neutral_values_and_refuse_others(name):
    neutral = SAMPLING_ARGUMENTS[name].neutral
    for value in ("odd",) if neutral is None else neutral:
        assert SamplingParams(**{name: value}) == SamplingParams()
    if neutral is not None:
        with pytest.raises(NotImplementedError, match=rf"^{name} .*got 'odd': "):
            SamplingParams(**{name: "odd"})


@walk(("release", "name", "default"), recorded("LLM"))
def test_a_model_takes_every_argument_of_vllm_with_its_default(release, name, default, tmp_path):
    if name == "model":
        return
    known = name in LLM_ARGUMENTS or name in inspect.signature(LLM).parameters
    assert known, f"vLLM {release} has {name}"
    if default != COMPUTED:
        with pytest.raises(FileNotFoundError):
            LLM(tmp_path, **{name: default})


@walk("release", RECORD)
def test_a_model_loads_with_the_defaults_of_vllm(release, model):
    """As in a call that names all arguments."""
    given = {name: value for name, value in RECORD[release]["LLM"].items() if value != COMPUTED}
    given |= {"model": model, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 10**6, "device": "cpu"}
    with closing(LLM(**given)) as llm:
        assert llm.engine.scheduler.max_num_seqs == 64


@walk(("release", "name", "default"), recorded("SamplingParams"))
def test_parameters_take_every_argument_of_vllm_with_its_default(release, name, default):
    known = name in SAMPLING_ARGUMENTS or name in inspect.signature(SamplingParams).parameters
    assert known, f"vLLM {release} has {name}"
    if default != COMPUTED:
        assert SamplingParams(**{name: default}) == SamplingParams()


def test_methods_take_every_argument_of_vllm_with_its_default():
    taken = {**CALL_ARGUMENTS, **dict.fromkeys(("messages", "prompts", "params", "sampling_params"))}
    for method in (LLM.generate, LLM.chat, LLM.beam_search):
        for release, name, default in recorded(method.__name__):
            known = name in taken or name in inspect.signature(method).parameters
            assert known, f"{method.__name__} of vLLM {release} has {name}"
            if name in CALL_ARGUMENTS:
                check_argument(CALL_ARGUMENTS, name, default)


def test_other_methods_take_the_arguments_of_vllm():
    llm = LLM.__new__(LLM)
    llm.engine = unittest.mock.MagicMock()
    llm.sleep(level=1, mode="abort")
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    assert llm.score([], use_tqdm=False) == []
    assert llm.enqueue([], SamplingParams(), use_tqdm=False, lora_request=None) == []
    with pytest.raises(NotImplementedError, match="reset_connector must be False, got True"):
        llm.reset_prefix_cache(reset_connector=True)
    with pytest.raises(TypeError, match=r"LLM\.sleep has no argument tags"):
        llm.sleep(tags=["weights"])
    with pytest.raises(TypeError, match=r"LLM\.reset_prefix_cache has no argument mode"):
        llm.reset_prefix_cache(mode="wait")


@walk("kind", [BeamSearchParams, StructuredOutputsParams])
def test_smaller_classes_take_every_argument_of_vllm_with_its_default(kind):
    needed = {"beam_width": 2, "max_tokens": 3} if kind is BeamSearchParams else {"choice": ["a"]}
    for release, name, default in recorded(kind.__name__):
        if name not in needed:
            assert kind(**needed, **{name: default}) == kind(**needed), f"vLLM {release} has {name}"


def test_methods_that_vllm_has_are_refused_by_name():
    llm = LLM.__new__(LLM)
    for name, words in NO_METHODS.items():
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=f"LLM has no {name}: {re.escape(words)}"):
            getattr(llm, name)
    with pytest.raises(NotImplementedError, match="lora_request is not supported"):
        llm.chat([], lora_request="adapter")


@walk(("release", "name", "default"), recorded("serve"))
def test_the_command_line_knows_every_option_of_vllm(release, name, default):
    if name in {"model", "model_tag", "config"}:
        return
    known = name in SERVE_ARGUMENTS or name in inspect.signature(serve).parameters
    assert known, f"vLLM {release} has --{name.replace('_', '-')}"
    if name in SERVE_ARGUMENTS and default != COMPUTED and name not in OTHER_DEFAULTS:
        check_argument(SERVE_ARGUMENTS, name, default)


def test_short_options_are_those_of_vllm():
    assert set().union(*(found["short"].items() for found in RECORD.values())) <= SHORT_OPTIONS.items()


def test_guided_json_names_structured_outputs():
    with pytest.raises(NotImplementedError, match=r"use structured_outputs=\{'json': "):
        SamplingParams(guided_json={})
    body = Body({"guided_json": {}})
    with pytest.raises(ApiError, match=r"use structured_outputs=\{'json': "):
        body.finish()


def test_a_misspelt_argument_is_told_the_nearest(tmp_path):
    with pytest.raises(TypeError, match="LLM has no argument max_model_length; did you mean max_model_len"):
        LLM(tmp_path, max_model_length=3)
    with pytest.raises(TypeError, match="LLM has no argument n: it is an argument of SamplingParams"):
        LLM("folder", n=8)
    with pytest.raises(TypeError, match=r"LLM\.generate has no argument n: it is .* of SamplingParams"):
        LLM.generate(None, "a", n=8)
    with pytest.raises(TypeError, match="SamplingParams has no argument max_token; did you mean max_tokens"):
        SamplingParams(max_token=3)


def test_parameters_are_copied():
    params = SamplingParams(max_tokens=3, best_of=1)
    assert copy.deepcopy(params) == copy.copy(params) == params


def options(name, argument):
    """Words of the command line that give an argument each neutral value that it can spell."""
    option = name.replace("_", "-")
    for value in (
        (("odd",) if not argument.flag else (True, False)) if argument.neutral is None else argument.neutral
    ):
        if argument.flag:
            yield [f"--{option}" if value else f"--no-{option}"]
        elif value is not None:
            yield [f"--{option}", value if isinstance(value, str) else json.dumps(value)]


def output_of(*words):
    result = CliRunner().invoke(APPLICATION, ["serve", *map(str, words)])
    assert result.exit_code == 2
    return re.sub(r"[\s│]+", " ", result.output)


def test_the_command_line_takes_what_changes_nothing(tmp_path):
    words = [word for name, one in SERVE_ARGUMENTS.items() for given in options(name, one) for word in given]
    assert len(words) > 150
    assert "config.json" in output_of(tmp_path, *words)


def test_options_may_be_short_and_have_underscores(tmp_path):
    """Each stands for an option of ours, or for one in the table."""
    own = {f"--{name.replace('_', '-')}" for name in (*inspect.signature(serve).parameters, *SERVE_ARGUMENTS)}
    assert set(SHORT_OPTIONS.values()) <= own
    assert "--tensor-parallel-size" in output_of(tmp_path, "-tp", "0")
    assert "--max-model-len" in output_of(tmp_path, "--max_model_len=many")
    assert "config.json" in output_of(
        tmp_path, "-tp=1", "-pp", "1", "--tensor_parallel_size", "1", "-q", "fp8"
    )


def test_a_server_takes_every_argument_of_a_model():
    beside = {"model", "tokenizer"}
    assert inspect.signature(LLM).parameters.keys() - beside <= inspect.signature(serve).parameters.keys()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-pp", "2"], "--pipeline-parallel-size"),
        (["--enable-lora"], "--enable-lora"),
        (["--enable-prompt-embeds"], "--enable-prompt-embeds"),
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill"),
        (["--hf-overrides", '{"a": 1}'], "--hf-overrides"),
        (["--tokenizer-mode=mistral"], "--tokenizer-mode"),
    ],
    ids=str,
)
def test_the_command_line_refuses_by_name(words, named, tmp_path):
    """The rows of the table are tested by Python's arguments; here, how they are written."""
    assert re.search(rf"{named} (must be|is not supported)", output_of(tmp_path, *words))


def test_a_file_of_options_takes_them_too(tmp_path):
    for value, said in ((False, "config.json"), (True, "--trust-remote-code must be False")):
        file = tmp_path / "options.json"
        file.write_text(json.dumps({"trust-remote-code": value}))
        result = CliRunner().invoke(APPLICATION, ["serve", str(tmp_path), "--config", str(file)])
        assert said in re.sub(r"[\s│]+", " ", result.output)
