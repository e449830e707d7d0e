"""Guesses of a draft model: answers are those without guesses, token by token."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from engine_models import MODELS, SIZES, VOCABULARY, folder, greedy, load, prompts

from flashtile.engine import SamplingParams
from flashtile.engine import runner as runner_module
from flashtile.engine.runner import Runner
from flashtile.engine.sampler import Choice, candidates, choose, stream_seed
from flashtile.engine.speculation import accepted_path, comb, depths, visible

LENGTH = 14
SMALL = {"num_gpu_blocks_override": 17, "max_num_seqs": 4, "swap_space": 0.001}


def drafted(by: str = "llama2", tokens: int = 3, width: int = 1) -> dict:
    config = {"method": "draft_model", "model": folder(by), "num_speculative_tokens": tokens}
    return {"speculative_config": {**config, "tree_width": width}, "block_size": 4}


def test_tokens_and_guesses_come_back(monkeypatch):
    """From a card; events and copies are those of the CPU here."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    runner = SimpleNamespace(device=torch.device("cuda"))
    tokens, guesses = torch.tensor([5, 6, 7]), torch.tensor([[1, 2], [3, 4]])
    result = SimpleNamespace(tokens=tokens, drafted=("ab", guesses), best=tokens, scores={}, prompt_scores=[])
    Runner._send_back(runner, result)
    assert torch.equal(result.tokens, tokens)
    assert result.drafted[0] == "ab"
    assert torch.equal(result.drafted[1], guesses)


def test_a_tree_of_guesses():
    """Two guesses in a row, each with a sibling: 0 is the last token, 1 and 2 the row, 3 and 4 the others."""
    parents = comb(2, 2)
    assert parents == (0, 1, 0, 1)
    assert depths(parents) == [0, 1, 2, 1, 2]
    assert [f"{bits:05b}" for bits in visible(parents)] == ["00001", "00011", "00111", "01001", "10011"]
    guesses = [7, 8, 9, 7]
    assert accepted_path(guesses, parents, [7, 7, 0, 0, 5]) == [0, 1, 4]
    assert accepted_path(guesses, parents, [9, 7, 0, 3, 5]) == [0, 3]
    assert accepted_path(guesses, parents, [5, 7, 0, 3, 5]) == [0]
    assert accepted_path([], (), [5]) == [0]


@pytest.mark.parametrize(
    ("name", "by", "width", "more"),
    [
        ("llama3", "llama2", 1, {}), ("llama3", "qwen3", 3, SMALL), ("qwen3", "qwen3", 1, SMALL),
        ("qwen3", "llama2", 3, {}), ("gemma2", "mistral", 1, SMALL), ("gpt_oss", "llama2", 1, {}),
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_without_guesses(name, by, width, more):
    """Sequences end at different steps, some in the middle of guesses."""
    llm = load(name, **drafted(by, width=width), **more)
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - i) for i in range(5)]
    outputs = llm.generate(prompts(), params)
    expected = [tokens[: LENGTH - i] for i, tokens in enumerate(greedy(name, LENGTH))]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    manager = llm.engine.scheduler.manager
    manager.check_integrity()
    assert manager.sequences == ()


@pytest.mark.parametrize("width", [1, 2])
def test_sampled_tokens_are_those_without_guesses(width):
    """With answers that share blocks, chunks beside guesses, and biases that the drafts lack."""
    params = [
        SamplingParams(seed=i, n=1 + i % 2, max_tokens=12, top_p=0.9, temperature=0.7, logit_bias={i: 5.0})
        for i in range(5)
    ]
    plain = load("llama3").generate(prompts(), params)
    options = {**drafted("llama3", 3, width), "max_num_batched_tokens": 24, "max_num_seqs": 12}
    guessed = load("llama3", **options).generate(prompts(), params)
    tokens = [[[one.token_ids for one in output.outputs] for output in many] for many in (plain, guessed)]
    assert tokens[0] == tokens[1]


PENALTIES = [
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 0, "frequency_penalty": -0.4, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3, "seed": 3, "n": 2},
    {"repetition_penalty": 0.7, "seed": 4},
    {"temperature": 0},
]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, **SMALL, "max_num_batched_tokens": 6, "block_size": 4},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        ("llama3", 3),
        ("llama3", 3, 2),
    ],
    ids=["overlap", "overlap in little memory", "prompt lookup", "draft", "tree"],
)
def test_penalties_count_tokens_that_the_host_has_not_read(options, monkeypatch):
    """The token of the step in flight, and guesses: answers are those of an engine that waits for both."""
    if isinstance(options, tuple):
        options = {**drafted(*options), "max_num_batched_tokens": 24, "max_num_seqs": 12}
    params = [SamplingParams(max_tokens=18, **one) for one in PENALTIES]
    expected = load("llama3").generate(prompts(), params)
    counts = []
    unread = runner_module._unread

    def counted(*arguments):
        counts.append(len(found := unread(*arguments)))
        return found

    monkeypatch.setattr(runner_module, "_unread", counted)
    outputs = load("llama3", **options).generate(prompts(), params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
    assert sum(counts) > 20


@pytest.mark.parametrize(("name", "width"), [("llama3", 1), ("llama3", 2), ("window of 1", 1)])
def test_drafting_writes_to_no_shared_block(name, width, monkeypatch):
    """Prompts that fill their last block, which their answers and the prefix cache share."""
    monkeypatch.setitem(MODELS, "window of 1", {**MODELS["mistral"], "sliding_window": 1})
    params = [SamplingParams(n=2, seed=i, max_tokens=9, ignore_eos=True) for i in range(3)]
    asked = [list(range(3, 3 + length)) for length in (4, 8, 9)]
    plain = load(name).generate(asked, params)
    llm = load(name, **drafted(name, 3, width), max_num_seqs=8)
    drafter, pool = llm.engine.runner.drafter, llm.engine.scheduler.manager.pool
    hidden = drafter.model.hidden

    def check(step, *caches):
        if step.slots is not None:  # steps that the draft model follows have none
            blocks = step.slots[step.slots >= 0] // 4
            assert all(pool.refs[block] == 1 for block in blocks.tolist())
            assert 0 not in blocks or not pool.null_blocks
        return hidden(step, *caches)

    monkeypatch.setattr(drafter.model, "hidden", check)
    guessed = llm.generate(asked, params)
    tokens = [[[one.token_ids for one in output.outputs] for output in many] for many in (plain, guessed)]
    assert tokens[0] == tokens[1]
    assert llm.engine.num_guessed_tokens > 0


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_guesses_for_itself_is_always_right(temperature, captured):
    """So its keys and values, positions and noise are those of the model: 4 tokens a step."""
    rows = {"max_num_seqs": len(prompts())} if captured else {}  # a graph's batch is padded beyond them
    llm = load("llama3", **drafted("llama3"), **rows)
    if captured:  # graphs replayed by computing again
        runner = llm.engine.runner
        runner.capture, runner._logits = (lambda run: run), torch.zeros(40, VOCABULARY)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=13, ignore_eos=True)
    engine, steps = llm.engine, 0
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert engine.num_guessed_tokens == len(prompts()) * 9
    assert steps == 4
    if captured:
        assert {form.width for form in llm.engine.runner.graphs} == {4}
        assert len(engine.runner.drafter.graphs) == 2


def test_a_text_that_repeats_itself_in_short_is_guessed_as_far_as_wanted():
    """One token again and again, with four guesses: five tokens a step."""
    llm = load("llama3", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    engine, steps = llm.engine, 0
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, allowed_token_ids=[7])
    engine.add_request("one", prompts()[0], params)
    while engine.has_unfinished:
        outputs = engine.step()
        steps += 1
    assert outputs[0].outputs[0].token_ids == [7] * 21
    assert steps == 6  # the prompt, the first repetition, and then five tokens a step


def test_more_branches_guess_more():
    """A right sibling is computed again in the next step: its answer is the same, too."""
    counts = []
    for width in (1, 4):
        llm = load("llama3", **drafted("llama2", 2, width))
        outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert [output.outputs[0].token_ids[:LENGTH] for output in outputs] == greedy("llama3", LENGTH)
        counts.append(llm.engine.num_guessed_tokens)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("width", [1, 3])
def test_draws_have_the_models_distribution_and_guesses_are_right_as_often_as_promised(width):
    """20,000 draws of a model and of another that guesses, with the same noise. Each token's frequency lies
    within five standard deviations of its probability. A guess is right with a probability of at least
    (1 - d) / (1 + d), d the total variation distance of the two models, within five, too."""
    count, size = 20000, 12
    torch.manual_seed(0)
    logits = torch.randn(size)
    drafted = logits + 0.5 * torch.randn(size)
    ones, zeros = torch.ones(count), torch.zeros(count, dtype=torch.int64)
    seeds = torch.tensor([stream_seed(seed, 0) for seed in range(count // 10)]).repeat_interleave(10)
    choice = Choice(ones, zeros, ones, zeros.float(), seeds, False, False, False, False)
    positions = torch.arange(count) % 10
    draws, _ = choose(logits.expand(count, -1), choice, positions)
    guesses = candidates(drafted.expand(count, -1), choice, positions, width)

    def deviations(found, expected):
        return (found - expected) / (expected * (1 - expected) / count).sqrt()

    p, q = logits.softmax(0), drafted.softmax(0)
    assert deviations(torch.bincount(draws, minlength=size) / count, p).abs().max() < 5
    distance = (p - q).abs().sum() / 2
    assert 0.1 < distance < 0.5
    right = (guesses == draws.unsqueeze(1)).any(1).float().mean()
    assert deviations(right, (1 - distance) / (1 + distance)) > -5
    if width == 1:
        assert deviations(torch.bincount(guesses[:, 0], minlength=size) / count, q).abs().max() < 5
        assert right <= 1 - distance + 5 * (0.25 / count) ** 0.5  # nothing can be right more often


def test_speculation_that_cannot_be_is_refused(tmp_path):
    def refused(message, kind=ValueError, name="llama3", **config):
        with pytest.raises(kind, match=message):
            load(name, speculative_config=config)

    refused("method 'ngram' or 'draft_model', got 'eagle'", NotImplementedError, method="eagle")
    refused("model with the draft model's folder, got None", TypeError, method="draft_model")
    refused("must have only fields of draft_model, got .'seed'", NotImplementedError, model="x", seed=1)
    refused("num_speculative_tokens must be from 1 to 62, got 63", method="ngram", num_speculative_tokens=63)
    refused("tree_width must be from 1 to 15 with num_speculative_tokens=4, got 16", model="x", tree_width=16)
    refused("config.json", FileNotFoundError, model=str(tmp_path))
    config = {**SIZES, "model_type": "llama", "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("model with the model's vocab_size=120, got 8", model=str(tmp_path))
    refused(
        "tree_width must be 1 for models with sliding windows", NotImplementedError, "gemma2",
        model=str(folder("llama2")), tree_width=2,
    )  # fmt: skip
