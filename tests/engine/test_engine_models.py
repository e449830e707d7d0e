"""Greedy tokens are those of Transformers, for every family and any division of the work."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine_models import MODELS, VOCABULARY, folder, greedy, load, prompts, transformers_model

from flashtile.engine import LLM, BeamSearchParams, SamplingParams
from flashtile.engine.families import FAMILIES
from flashtile.engine.memory import run_one_layer
from flashtile.engine.model import FEW_ROWS, Matrix, Norm
from flashtile.engine.outputs import FlatLogprobs, Logprob
from flashtile.engine.request import State
from flashtile.linear import linear_qkv

pytestmark = pytest.mark.numerical

LENGTH = 14
WAYS = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 6, "max_num_seqs": 3, "block_size": 4},
    "recomputed": {
        "num_gpu_blocks_override": 13, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 5,
        "async_scheduling": True,
    },
    "swapped": {
        "num_gpu_blocks_override": 13, "block_size": 4, "swap_space": 0.001, "async_scheduling": True,
    },
    "guessed": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "block_size": 4},
    "guessed in a small pool": {
        "speculative_config": {"method": "ngram"}, "num_gpu_blocks_override": 13, "block_size": 4,
        "max_num_batched_tokens": 9, "max_num_seqs": 5,
    },
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 3},
}  # fmt: skip


def test_every_family_is_compared_with_transformers():
    assert {one["model_type"] for one in MODELS.values()} == {*FAMILIES}


WAYS_OF_ALL, WITH_ALL_WAYS = ("plain", "chunks"), ("llama3", "gemma2", "gpt_oss", "qwen3_moe")
"""With ``make test``: the ways of every family, and the families with every way."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name, way, marks=() if way in WAYS_OF_ALL or name in WITH_ALL_WAYS else pytest.mark.thorough
        )
        for name in MODELS
        for way in WAYS
    ],
)
def test_greedy_tokens_are_those_of_transformers(name, way):
    llm = load(name, **WAYS[way])
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
    assert [output.outputs[0].token_ids for output in outputs] == greedy(name, LENGTH)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    if way in ("recomputed", "swapped") and min(llm.model_config.windows) < 0:
        assert llm.get_metrics().num_preemptions > 0
    manager = llm.engine.scheduler.manager
    manager.check_integrity()
    assert manager.sequences == ()


def test_queries_and_keys_of_single_tokens_are_normalised_in_the_product():
    llm, found = load("qwen3"), []
    noted = mock.patch.object(Norm, "__call__", side_effect=lambda x: found.append(x) or x)
    with mock.patch("flashtile.engine.model.linear_qkv", side_effect=linear_qkv) as product, noted:
        llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    layers = llm.engine.runner.model.config.num_layers
    assert [call.kwargs["q_norm_weight"].shape for call in product.call_args_list] == [(16,)] * 3 * layers
    assert {len(x) for x in found} == {3}  # only the prompt's


@pytest.mark.parametrize("tokens", [FEW_ROWS // 2, FEW_ROWS + 8])
@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3_moe"])
def test_memory_is_measured_by_a_step_through_one_layer(name, tokens):
    model = load(name).engine.runner.model
    ran = []
    hook = mock.patch.object(type(model), "logits", lambda self, hidden: ran.append(hidden.shape) or hidden)
    with hook:
        taken = run_one_layer(model, tokens, 4)
    length = min(tokens, len(model.rotary[0]))
    assert ran == [(length, model.config.hidden_size)]
    per_token = 2 * model.kv_heads * model.config.head_dim * model.embedding.itemsize
    assert taken == -(-tokens // 4) * 4 * per_token


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_steps_of_single_tokens_are_padded_and_captured(name):
    """Graphs replayed by computing again: numbers, padding and logits are where a graph finds them."""
    llm = load(name, block_size=4, async_scheduling=True, max_num_seqs=6)
    runner, captured = llm.engine.runner, []

    def capture(run):
        captured.append(run)
        return run

    runner.capture, runner._logits = capture, torch.zeros(8, 120)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=LENGTH))
    assert [output.outputs[0].token_ids for output in outputs] == greedy(name, LENGTH)
    assert sorted(form.batch for form in runner.graphs) == [8]
    assert len(captured) == 1
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - i, prompt_logprobs=1) for i in range(5)]
    outputs = llm.generate(prompts(), params)
    expected = [tokens[: LENGTH - i] for i, tokens in enumerate(greedy(name, LENGTH))]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [len(output.prompt_logprobs) for output in outputs] == [5, 21, 1, 14, 30]
    assert sorted(form.batch for form in runner.graphs) == [1, 2, 4, 8]


def test_a_second_run_finds_the_first_ones_blocks():
    llm = load("llama3", block_size=4)
    for expected in (0, 28):  # the prompt's last token is computed in any case
        (output,) = llm.generate([prompts()[4]], SamplingParams(temperature=0, max_tokens=LENGTH))
        assert output.num_cached_tokens == expected
        assert output.outputs[0].token_ids == greedy("llama3", LENGTH)[4]
    llm.reset_prefix_cache()
    (output,) = llm.generate([prompts()[4]], SamplingParams(temperature=0, max_tokens=1))
    assert output.num_cached_tokens == 0


def test_one_beam_is_the_greedy_search():
    outputs = load("llama3").beam_search(prompts()[:4], BeamSearchParams(1, LENGTH))
    assert [output.outputs[0].token_ids for output in outputs] == greedy("llama3", LENGTH)[:4]


@pytest.mark.parametrize("blocks", [60, 14])
@pytest.mark.parametrize(("name", "ends"), [("qwen3", []), ("llama2", [3, 17, 40])])
def test_beams_are_those_of_transformers(name, ends, blocks):
    model, width = transformers_model(name), 3
    params = BeamSearchParams(width, LENGTH, stop_token_ids=ends, include_stop_str_in_output=True)
    llm = load(name, num_gpu_blocks_override=blocks, block_size=4)
    outputs = llm.beam_search(prompts()[:4], params)
    for prompt, output in zip(prompts(), outputs, strict=False):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, num_beams=width,
            num_return_sequences=width, eos_token_id=ends or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        tokens = [one.token_ids for one in output.outputs]
        rows = [row[len(prompt) :].tolist() for row in expected.sequences]
        assert tokens == [row[: len(one)] for row, one in zip(rows, tokens, strict=True)]
        assert all(not any(row[len(one) :]) for row, one in zip(rows, tokens, strict=True))
        scores = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
        torch.testing.assert_close(torch.tensor(scores), expected.sequences_scores, atol=1e-4, rtol=0)
        assert output.metrics.memory_saved > 0
    llm.engine.scheduler.manager.check_integrity()
    assert llm.engine.scheduler.manager.sequences == ()


def test_parallel_answers_share_the_prompt():
    llm = load("llama3", block_size=4)
    params = SamplingParams(n=4, temperature=0, max_tokens=6)
    (output,) = llm.generate([prompts()[4]], params)
    expected = greedy("llama3", LENGTH)[4][:6]
    assert [one.token_ids for one in output.outputs] == [expected] * 4
    assert 0.4 < output.metrics.memory_saved < 0.75


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"ignore_eos": True}),
        ({}, {"stop_token_ids": list(range(12)), "max_tokens": 30}),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"max_tokens": 20}),
        ({"num_gpu_blocks_override": 24}, {"max_tokens": 30}),
        ({"async_scheduling": True}, {"stop_token_ids": list(range(12)), "max_tokens": 30}),
    ],
    ids=["together", "stopped", "guesses", "preempted", "async"],
)
def test_blocks_of_answers_are_counted_in_every_step(options, more):
    """Though the engine looks at them only when an answer begins or ends, or has other blocks."""
    llm = load("llama3", block_size=4, **options)
    engine, manager, expected = llm.engine, llm.engine.scheduler.manager, [0, 0]
    launch = engine.runner.launch

    def counted(schedule):
        for request in dict.fromkeys(entry.sequence.request for entry in schedule.entries):
            running = [one for one in request.sequences if one.state is State.RUNNING]
            blocks = [manager.blocks(one.block_sequence) for one in running if one.block_sequence is not None]
            expected[0] += len({block for row in blocks for block in row})
            expected[1] += sum(map(len, blocks))
        return launch(schedule)

    engine.runner.launch = counted
    params = SamplingParams(**{"n": 3, "temperature": 1.0, "seed": 2, "max_tokens": 9} | more)
    outputs = llm.generate([prompt * 2 for prompt in prompts()[:3]], params)
    assert sum(output.metrics.blocks for output in outputs) == expected[0]
    assert sum(output.metrics.unshared_blocks for output in outputs) == expected[1]


def test_logprobs_are_those_of_transformers():
    model, prompt = transformers_model("qwen3"), prompts()[4]
    llm = load("qwen3", max_num_batched_tokens=8, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params)
    (answer,) = output.outputs
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *answer.logprobs]
    for position, (token, entry) in enumerate(zip((prompt + answer.token_ids)[1:], entries, strict=True)):
        count = 2 if position < len(prompt) - 1 else 3
        best = expected[position].topk(count)
        assert next(iter(entry)) == token
        assert set(entry) == {token, *best.indices.tolist()}
        for other, (logprob, rank, _) in entry.items():
            assert logprob == pytest.approx(expected[position, other].item(), abs=1e-4)
            assert rank == int((expected[position] > expected[position, other]).sum()) + 1
    chosen = [entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert type(pickle.loads(pickle.dumps(output)).prompt_logprobs) is list
    assert output.prompt_logprobs == pickle.loads(pickle.dumps(output.prompt_logprobs))


def test_flat_log_probabilities_are_a_sequence_of_dicts():
    flat = FlatLogprobs(lambda token: f"<{token}>", missing=1)
    flat.add([5, 6], [-1.0, -2.0], [1, 3], [-1.0, -1.5, -0.5, -0.75], [5, 4, 9, 8])
    entries = [
        None,
        {5: Logprob(-1.0, 1, "<5>"), 4: Logprob(-1.5, 2, "<4>")},
        {6: Logprob(-2.0, 3, "<6>"), 9: Logprob(-0.5, 1, "<9>"), 8: Logprob(-0.75, 2, "<8>")},
    ]
    assert flat == entries == list(flat)
    assert (flat[-1], flat[:2], len(flat), repr(flat)) == (entries[2], entries[:2], 3, repr(entries))
    with pytest.raises(IndexError):
        flat[3]
    answer = FlatLogprobs(None)
    answer.add([5, 6], [-1.0, -2.0], [1, 3], [], [])
    assert answer.since(1) == [{6: Logprob(-2.0, 3)}]
    assert answer.since(2) == []


@pytest.mark.parametrize("length", [20, 40])
def test_logits_with_longrope_are_those_of_transformers(tmp_path, length):
    """Up to the original length with the short factors, beyond it with the long ones."""
    original = {"original_max_position_embeddings": 25}
    rope = {**json.loads((folder("phi3") / "config.json").read_text())["rope_parameters"], **original}
    check_logits(tmp_path, "phi3", {**original, "rope_parameters": rope}, length)


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_logits_with_dynamic_scaling_are_those_of_transformers(tmp_path, name, length):
    """Up to the original length without scaling, beyond it with that of the length."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    check_logits(tmp_path, name, {"max_position_embeddings": 25, "rope_parameters": rope}, length)


def check_logits(tmp_path, name, changes, length):
    """Compare a changed model with ``max_model_len=length`` with Transformers, over so long a sequence."""
    shutil.copytree(folder(name), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model = type(transformers_model(name)).from_pretrained(tmp_path / "model", attn_implementation="eager")
    prompt = [token % VOCABULARY for token in range(3, 3 + length - 5)]
    llm = LLM(tmp_path / "model", device="cpu", skip_tokenizer_init=True, max_model_len=length)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0))
    tokens = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    assert output.outputs[0].token_ids == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    found = [
        entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_bf16_logits_are_as_near_as_transformers_own():
    """Against float32, at most twice as far off as Transformers in bf16."""
    name, prompt = "llama3", prompts()[4]
    with torch.no_grad():
        exact = transformers_model(name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        import copy

        plain = copy.deepcopy(transformers_model(name)).bfloat16()(torch.tensor([prompt])).logits[0]
    llm = LLM(folder(name), device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    ours = torch.tensor(
        [[entry[t].logprob for t in range(exact.shape[1])] for entry in output.prompt_logprobs[1:]]
    )
    errors = [(x - exact[:-1]).norm() for x in (ours, plain.float().log_softmax(-1)[:-1])]
    assert errors[0] <= 2 * errors[1]
    assert errors[0] > 0


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8", "dtype": "bfloat16"}])
def test_fp8_caches_and_weights_are_near(options):
    llm = load("llama3", **options)
    (output,) = llm.generate([prompts()[4]], SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    model = transformers_model("llama3")
    with torch.no_grad():
        expected = model(torch.tensor([prompts()[4]])).logits[0, -1].log_softmax(-1)
    entry = output.outputs[0].logprobs[0]
    ours = torch.tensor([entry[t].logprob for t in range(len(expected))])
    assert 0 < (ours - expected).std() < 0.2 * expected.std()


def test_a_residual_of_many_tokens_is_added_in_its_own_memory():
    """Of few it stays as it is, and so does one beside a bias."""
    x, weight, bias = torch.randn(FEW_ROWS + 1, 6), torch.randn(4, 6), torch.randn(4)
    for rows, b, in_place in (
        (FEW_ROWS + 1, None, True),
        (FEW_ROWS + 1, bias, False),
        (3, None, False),
    ):
        residual = torch.randn(rows, 4)
        expected = torch.nn.functional.linear(x[:rows], weight, b) + residual
        out = Matrix(weight, bias=b)(x[:rows], residual=residual)
        torch.testing.assert_close(out, expected)
        assert (out.data_ptr() == residual.data_ptr()) == in_place


def test_a_token_that_is_not_finite_stays_alone_among_many():
    x, weight = torch.randn(FEW_ROWS + 1, 70).bfloat16(), torch.randn(8, 70).bfloat16()
    x[5] = math.nan
    out = Matrix(weight)(x, residual=torch.randn(FEW_ROWS + 1, 8).bfloat16())
    assert out.isfinite().all(1).sum() == FEW_ROWS


@pytest.mark.parametrize(("length", "calls"), [(1, 1), (12, 2)])
def test_blocks_are_hashed_for_the_prefix_cache_only_where_there_are_new_ones(length, calls):
    """When the prompt is computed, and at the end if the answer has filled a block."""
    llm = load("llama3", block_size=8)
    manager = llm.engine.scheduler.manager
    with mock.patch.object(manager, "cache_blocks", wraps=manager.cache_blocks) as cached:
        llm.generate([list(range(3, 23))], SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    assert cached.call_count == calls
    (again,) = llm.generate([list(range(3, 23))], SamplingParams(max_tokens=1))
    assert again.num_cached_tokens == 16


@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_weights_in_several_files_are_those_in_one(tmp_path, name):
    transformers_model(name).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    llm = LLM(tmp_path, device="cpu", skip_tokenizer_init=True)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=4))
    assert [output.outputs[0].token_ids for output in outputs] == [row[:4] for row in greedy(name, LENGTH)]


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_of_its_own_in_a_tied_checkpoint_is_kept(tmp_path, caplog, differs):
    """As in Transformers 5, which compares what is stored."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder("llama2"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    head = weights["model.embed_tokens.weight"].clone()
    if differs:
        head[[3, 50]] = head[[50, 3]]
    save_file({**weights, "lm_head.weight": head}, path)
    llm = LLM(tmp_path / "model", device="cpu", skip_tokenizer_init=True)
    assert llm.model_config.tie_word_embeddings is not differs
    assert ("lm_head.weight differs" in caplog.text) is differs
    assert torch.equal(llm.engine.runner.model.head.weight, head)
    theirs = type(transformers_model("llama2")).from_pretrained(tmp_path / "model")
    assert torch.equal(theirs.lm_head.weight, head)


def test_a_norm_whose_weight_has_another_dtype_is_computed_in_float32():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator).bfloat16(), torch.randn(8, generator=generator)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight.double()
    found = Norm(SimpleNamespace(norm_eps=0.5, family=SimpleNamespace(unit_norm=False)), weight)(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, expected.bfloat16(), atol=0, rtol=2**-7)
