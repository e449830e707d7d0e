"""Batch invariance: the bits of log-probabilities do not depend on what else an engine computes."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from engine_models import MODELS, VOCABULARY, folder, load, transformers_model

from flashtile.backends.cpu import decode as cpu_decode
from flashtile.backends.cpu import linear as cpu_linear
from flashtile.engine import LLM, SamplingParams
from flashtile.engine import llm as llm_module
from flashtile.engine.model import Attention
from flashtile.engine.outputs import RequestOutput

ALONE: dict[str, Any] = {
    "max_num_seqs": 2, "max_num_batched_tokens": 128, "enable_prefix_caching": False, "enforce_eager": True
}  # fmt: skip
"""An engine that computes one or two sequences at a time, their prompts in one step, without CUDA graphs."""
ENGINES: list[dict[str, Any]] = [
    {"max_num_seqs": 8, "max_num_batched_tokens": 13, "block_size": 4, "num_gpu_blocks_override": 19,
     "max_model_len": 72},
    {"max_num_seqs": 16, "max_num_batched_tokens": 90, "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    {"max_num_seqs": 5, "max_num_batched_tokens": 7, "async_scheduling": True},
    {"max_num_seqs": 8, "max_num_batched_tokens": 29, "block_size": 8, "num_gpu_blocks_override": 18,
     "swap_space": 0.01},
]  # fmt: skip
"""Short chunks with preemption and found prefixes, guesses, overlap of steps, swapping."""


def drafted(name: str) -> dict[str, Any]:
    """An engine with a draft model, the model itself: many of its guesses are accepted."""
    config = {"model": folder(name), "num_speculative_tokens": 3}
    return {"max_num_seqs": 8, "max_num_batched_tokens": 40, "speculative_config": config}


PLAIN = ("llama3", "gemma2", "olmo2", "gpt_oss")
"""Biases, windows, caps, GELU, norms of all heads, sinks, experts."""


def requests_of(name: str, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, some with a common beginning, and their parameters."""
    draw = random.Random(name)
    prompts = [[draw.randrange(VOCABULARY) for _ in range((40, 17, 40, 1, 9)[i % 5])] for i in range(count)]
    for prompt in prompts[1::2]:
        prompt[:16] = prompts[0][: min(16, len(prompt))]
    return prompts, [
        SamplingParams(
            n=(2, 1)[i % 2], temperature=(0.7, 0)[i % 3 == 1], top_p=(1, 0.9)[i % 2],
            repetition_penalty=(1, 1.2)[i % 3 == 2], max_tokens=(24, 7)[i % 2], seed=i, logprobs=-1,
            ignore_eos=True,
        )
        for i in range(count)
    ]  # fmt: skip


class Requests:
    """Random requests, some with a common beginning, and their answers in several engines.

    Attributes:
        compared, differing: numbers of log-probabilities that were compared, and that had other bits.
    """

    def __init__(self, name: str, count: int, **options: Any):
        self.name, self.options, self.draw = name, {"batch_invariant": True, **options}, random.Random(name)
        self.prompts, self.params = requests_of(name, count)
        self.expected = self.answers(load(name, **ALONE, **self.options))
        self.compared = self.differing = 0

    def answers(self, llm: LLM) -> list[RequestOutput]:
        """Return the answers to the requests, which are computed in random order."""
        order = random.Random(self.draw.random()).sample(range(len(self.prompts)), len(self.prompts))
        found = llm.generate([self.prompts[i] for i in order], [self.params[i] for i in order])
        return [found[order.index(i)] for i in range(len(order))]

    def compare(self, settings: dict[str, Any]) -> LLM:
        """Compare the answers of an engine, and the scores of the expected tokens, with the expected ones."""
        llm = load(self.name, **settings, **self.options)
        llm.generate(self.prompts[0], SamplingParams(max_tokens=1))  # its blocks are found by later prompts
        self.compare_answers(self.answers(llm))
        whole = [(one.prompt_token_ids, answer) for one in self.expected for answer in one.outputs]
        scores = llm.score([[*prompt, *answer.token_ids] for prompt, answer in whole])
        for (prompt, answer), found in zip(whole, scores, strict=True):
            chosen = [
                one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ]
            self._count(found[len(prompt) - 1 :], chosen)
        return llm

    def compare_answers(self, answers: list[RequestOutput]) -> None:
        """Compare answers with the expected ones."""
        for found, expected in zip(answers, self.expected, strict=True):
            for one, other in zip(found.outputs, expected.outputs, strict=True):
                # Both have the same tokens up to the first log-probability that may differ.
                for position, wanted in enumerate(other.logprobs):
                    self._count(vocabulary(one.logprobs[position]), vocabulary(wanted))
                    if one.token_ids[position] != other.token_ids[position]:
                        break

    def _count(self, found: list[float], expected: list[float]) -> None:
        one, other = (struct.pack(f"{len(numbers)}f", *numbers) for numbers in (found, expected))
        self.compared += len(expected)
        self.differing += sum(one[i : i + 4] != other[i : i + 4] for i in range(0, len(other), 4))


def vocabulary(entry: Any) -> list[float]:
    return [entry[token].logprob for token in range(VOCABULARY)]


def compared(name: str, count: int, engines: list[dict[str, Any]], **options: Any) -> Requests:
    requests = Requests(name, count, **options)
    stats = []
    for settings in engines:
        llm = requests.compare(settings)
        stats.append(llm.get_metrics())
        if "model" in settings.get("speculative_config", {}):
            assert llm.engine.num_guessed_tokens > 0
    if len(engines) > 1:
        assert sum(one.prefix_hits for one in stats) > 0
        assert sum(one.num_preemptions for one in stats) > 0 or "sliding_window" in MODELS[name]
    return requests


@pytest.mark.parametrize("name", PLAIN)
def test_bits_do_not_depend_on_the_batch(name):
    """Chunks, order, preemption, found prefixes, guesses, forks, and scores of whole sequences."""
    requests = compared(name, 4, [*ENGINES[:2], drafted(name)])
    assert requests.compared > 10_000
    assert requests.differing == 0


def answers_of_a_process(name: str, count: int, threads: int, where: str) -> list[Any]:
    """Return the answers of two engines, one with sequences by themselves and one with a busy batch."""
    torch.set_num_threads(threads)
    given = {"device": "cpu", "skip_tokenizer_init": True, "warmup": False, "batch_invariant": True}
    prompts, params = requests_of(name, count)
    engines = [{**ALONE, "num_gpu_blocks_override": 64}, ENGINES[0]]
    return [LLM(where, **settings, **given).generate(prompts, params) for settings in engines]


def test_bits_are_those_of_another_process():
    """Engines that start again, in a process of their own, give the same bits."""
    requests = Requests("llama3", 4)
    given = "llama3", 4, torch.get_num_threads(), str(folder("llama3"))
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        restarted = process.submit(answers_of_a_process, *given).result()
    for answers in restarted:
        requests.compare_answers(answers)
    assert requests.compared > 20_000
    assert requests.differing == 0


@pytest.mark.thorough
@pytest.mark.slow
def test_none_of_a_million_log_probabilities_depends_on_the_batch(subtests):
    """All families, each with preemption, swapping, found prefixes, and guesses by two methods."""
    pytest.importorskip("transformers")
    total = differing = 0
    for name in MODELS:
        with subtests.test(name):
            requests = compared(name, 8, [*ENGINES, drafted(name)])
            total, differing = total + requests.compared, differing + requests.differing
            assert requests.compared > 100_000
            assert requests.differing == 0
    assert total > 10**6
    assert differing == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in MODELS), ("llama3", "float16"), ("gpt_oss", "float16")],
)
def test_bits_of_a_gpu_do_not_depend_on_the_batch(name, dtype):
    """With CUDA graphs and without, in addition to the differences on a CPU."""
    requests = compared(name, 8, [*ENGINES, drafted(name)], device="cuda", dtype=dtype)
    assert requests.compared > 100_000
    assert requests.differing == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {"dtype": "bfloat16", "quantization": "fp8"}),
        ("qwen3_moe", {"dtype": "float16", "kv_cache_dtype": "fp8"}),
    ],
    ids=["rounded weights", "rounded cache"],
)
def test_bits_of_16_bit_numbers_do_not_depend_on_the_batch(name, options):
    assert compared(name, 3, ENGINES[:1], **options).differing == 0


def one_product(problem, x, weight, given):
    return cpu_linear._linear(replace(problem, invariant=False), x, weight, given)


def shared_tiles(span, size, split=cpu_decode.split):
    return split(span, max(size, 8))


def fused_append(self, *given, append=Attention._append_few):
    self.qkv.invariant = False
    try:
        return append(self, *given)
    finally:
        self.qkv.invariant = True


def usual_attention_of_guesses(self, step, options=Attention._options):
    return options(self, step) | {"invariant": step.slots is None}


@pytest.mark.parametrize(
    ("where", "function", "planted", "engine"),
    [
        (cpu_linear, "_invariant", one_product, ENGINES[0]),
        (cpu_decode, "split", shared_tiles, ENGINES[0]),
        (Attention, "_append_few", fused_append, ENGINES[0]),
        (Attention, "_options", usual_attention_of_guesses, None),
    ],
    ids=["products of all rows", "queries that share tiles", "keys of single tokens", "guesses"],
)
def test_a_dependence_on_the_batch_is_noticed(where, function, planted, engine, monkeypatch):
    """The last one by an engine with guesses only."""
    monkeypatch.setattr(where, function, planted)
    if engine is None:
        assert compared("llama3", 4, ENGINES[:1]).differing == 0
    assert compared("llama3", 4, [engine or drafted("llama3")]).differing > 0


def test_scores_are_those_of_transformers():
    sequences = [[3, 14, 15, 92, 65], [35, 89]]
    llm = load("llama3", max_model_len=5, max_num_batched_tokens=8, max_num_seqs=2)
    for tokens, found in zip(sequences, llm.score(sequences), strict=True):
        with torch.no_grad():
            logits = transformers_model("llama3")(torch.tensor([tokens])).logits[0]
        expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected)


def test_what_cannot_be_scored_is_refused():
    for tokens in ([5], [5] * 129):
        with pytest.raises(ValueError, match=f"2 to max_model_len=128 tokens for score, got {len(tokens)}"):
            load("llama3").score([[3, 4], tokens])
    with pytest.raises(ValueError, match="logprobs_mode must be 'raw_logprobs'"):
        load("llama3", logprobs_mode="raw_logits").score([3, 4])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cascade_attention": True}, "cascade_attention"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": {"model": None, "num_speculative_tokens": 2, "tree_width": 2}}, "tree_width"),
    ],
    ids=["groups", "processes", "tree"],
)
def test_what_adds_in_other_orders_is_refused(options, name):
    if name == "tree_width":
        options["speculative_config"]["model"] = folder("llama3")
    with pytest.raises(NotImplementedError, match=rf"^{name} must be .* with batch_invariant, got (True|2)$"):
        load("llama3", batch_invariant=True, **options)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "needed", "got"),
    [
        (torch.float32, 128, "dtype must be bfloat16 or float16", torch.float32),
        (torch.float16, 121, "vocab_size must be a multiple of 8", 121),
    ],
    ids=["dtype", "vocabulary"],
)
def test_what_only_a_gpu_adds_in_other_orders_is_refused(dtype, vocab_size, needed, got):
    with pytest.raises(NotImplementedError, match=f"^{needed} on a GPU with batch_invariant, got {got}$"):
        llm_module._check_invariant(False, 1, 1, dtype, vocab_size)
    llm_module._check_invariant(False, 1, 1, None, vocab_size)  # a CPU
