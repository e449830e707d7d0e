"""flashtile's engine beside vLLM's, and vLLM with flashtile's attention: new tokens per second of one GPU.

    python -m benchmarks.beside_vllm --json beside_vllm.json
    python -m benchmarks.beside_vllm --contestants FLASH_ATTN,CUSTOM+cascade --workloads 32x8x1024
    python -m benchmarks.beside_vllm --model qwen3-0.6b --contestants flashtile,FLASH_ATTN --workloads steps64

Each contestant is an engine of its own, in a process of its own, one after the other: ``flashtile`` is
:class:`flashtile.LLM`, the other names are attention backends of ``vllm.LLM``, of which ``CUSTOM`` is
flashtile's. ``+cascade`` sets ``FLASHTILE_CASCADE_ATTENTION=1``, ``+invariant`` asks either engine for
results that do not depend on the batch. All other options are each engine's own. The model has random
weights, which each engine makes for itself. With ``--written`` all read the same ones from a file.

The workloads, all with ``ignore_eos``:

    32x8x1024        8 sampled answers to each of 32 prompts of 1,024 tokens. A fourth number is the number of
                     tokens with which all prompts begin.
    requests1000     1,000 sampled requests of ShareGPT-like lengths: 161 and 338 tokens on average
    greedy1000       the same, greedy
    prompts32x8000   32 greedy requests of 8,000 tokens, with 64 new tokens each
    steps64          greedy steps of 64 sequences behind 1,024 tokens: the difference of two runs, so without
                     prompts

Greedy answers to prompts of 200 tokens of their own, 32 ``alone`` and 32 ``shared`` ones behind the same
2,048 tokens, are compared with those of the first contestant that has the same weights: of the same library,
or with ``--written`` of all.
``equal_answers`` is the share of answers with equal tokens. The others part at ties: ``parted`` has for each
of them the place of the first other token, and the contestant's difference of log-probabilities between the
two tokens there. It is None if the difference is above 0.25, so no tie, or if the first contestant's token is
not among the five likeliest. ``blind_answers`` is the share of prompts with equal answers alone and behind
the common tokens. Where it is 1, as with the weights that vLLM makes, which are small, answers follow from
the last token, and equal ones say nothing about attention.

The file of ``--json`` is written after every round, so a run that is cut off loses one round at most.
``first_round`` has the rates of the rounds that compile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.suite.documents import source_commit
from benchmarks.suite.engine_bench import SERVED, sharegpt_lengths, tokens, write_model
from flashtile.files import replace_file
from flashtile.hardware import machine

CONTESTANTS = "flashtile,FLASH_ATTN,CUSTOM,CUSTOM+cascade"
WORKLOADS = "32x8x1024,8x16x4096,256x1x1024,32x8x1024x512,requests1000,greedy1000,prompts32x8000,steps64"
WORKLOAD = re.compile(r"(requests|greedy|steps)\d+|prompts\d+x\d+|\d+x\d+x\d+(x\d+)?")
ALONE, SHARED = "alone", "shared"
OWN_TOKENS, COMMON_TOKENS, GREEDY_TOKENS = 200, 2048, 64
LIKELIEST = 5
"""Number of the likeliest tokens that are compared with the chosen one."""
NEAR = 0.25
"""Largest difference of log-probabilities that is kept."""
Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[Any]]
"""(prompts, sampling parameters) -> outputs, of whose fields vLLM and flashtile have the same names."""


def load_format(options: argparse.Namespace) -> str:
    return "auto" if options.written else "dummy"


def flashtile_engine(folder: Path, options: argparse.Namespace, invariant: bool) -> Generate:
    from flashtile import LLM, SamplingParams

    llm = LLM(
        folder, load_format=load_format(options), skip_tokenizer_init=True, max_num_seqs=options.seqs,
        enforce_eager=options.eager, batch_invariant=invariant, **json.loads(options.ours),
    )  # fmt: skip

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Any]:
        return llm.generate(prompts, [SamplingParams(**own) for own in params], use_tqdm=False)

    return generate


def vllm_engine(folder: Path, options: argparse.Namespace, backend: str) -> Generate:
    import vllm

    llm = vllm.LLM(
        str(folder), load_format=load_format(options), skip_tokenizer_init=True, max_num_seqs=options.seqs,
        enforce_eager=options.eager, attention_backend=backend, **json.loads(options.more),
    )  # fmt: skip

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Any]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [vllm.SamplingParams(detokenize=False, **own) for own in params]
        return llm.generate(given, wanted, use_tqdm=False)

    return generate


def requests(workload: str, vocab_size: int, new: int, turn: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return (prompt, sampling parameters) of each request; each turn has other prompts of equal lengths."""
    kind, (count, *more) = workload.rstrip("0123456789x"), map(int, re.findall(r"\d+", workload))
    draw = random.Random(f"{workload} {turn}")  # no prompt of another workload is in the prefix cache
    seeds = [draw.randrange(2**32) for _ in range(count + 1)]
    if kind == "prompts":
        return [
            (tokens(more[0], vocab_size, seed), {"temperature": 0, "max_tokens": 64}) for seed in seeds[1:]
        ]
    if kind:
        heat = float(kind == "requests")
        return [
            (tokens(length, vocab_size, seed), {"temperature": heat, "max_tokens": answer})
            for length, answer, seed in zip(*sharegpt_lengths(count), seeds[1:], strict=True)
        ]
    answers, length, common = (*more, 0)[:3]
    system = tokens(common, vocab_size, seeds[0])
    params = {"n": answers, "temperature": 1.0, "seed": turn, "max_tokens": new}
    return [(system + tokens(length - common, vocab_size, seed), params) for seed in seeds[1:]]


def timed(generate: Generate, given: list[tuple[list[int], dict[str, Any]]]) -> tuple[int, float]:
    """Return (number of new tokens, seconds) of a call that answers all requests."""
    params = [{"ignore_eos": True, **own} for _, own in given]
    begun = time.perf_counter()
    outputs = generate([prompt for prompt, _ in given], params)
    seconds = time.perf_counter() - begun
    made = [sum(len(answer.token_ids) for answer in output.outputs) for output in outputs]
    wanted = [own.get("n", 1) * own["max_tokens"] for own in params]
    if made != wanted:
        raise AssertionError("answers that are not as long as was asked")
    return sum(made), seconds


def rate(generate: Generate, workload: str, options: argparse.Namespace, turn: int) -> float:
    """Return the new tokens per second of one run of a workload."""
    vocab_size = SERVED[options.model][1]
    if not workload.startswith("steps"):
        made, seconds = timed(generate, requests(workload, vocab_size, options.new, turn))
        return made / seconds
    batch, steps = int(workload.removeprefix("steps")), 256
    prompts = [tokens(1024, vocab_size, 5000 + batch * turn + i) for i in range(batch)]
    _, (_, short), (_, long) = (  # the first call fills the prefix cache for the others
        timed(generate, [(prompt, {"temperature": 0, "max_tokens": count}) for prompt in prompts])
        for count in (8, 8, 8 + steps)
    )
    return batch * steps / (long - short)


def greedy_answers(generate: Generate, model: str) -> dict[str, list[dict[str, Any]]]:
    """Return greedy answers of each kind of prompt: tokens, and log-probabilities of those that came near.

    ``near`` has a dict for each token of the answer: other token (as text, as in JSON) -> log-probability of
    the chosen token minus that of the other one, if they are near.
    """
    sizes, vocab_size = SERVED[model][:2]
    own, common, new = (
        min(most, sizes.longest // part)
        for most, part in ((OWN_TOKENS, 4), (COMMON_TOKENS, 2), (GREEDY_TOKENS, 8))
    )
    prompts = [tokens(own, vocab_size, seed) for seed in range(32)]
    system = tokens(common, vocab_size, 32)
    params = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "logprobs": LIKELIEST}
    found = {}
    for kind, given in ((ALONE, prompts), (SHARED, [system + prompt for prompt in prompts])):
        answers = [output.outputs[0] for output in generate(given, [params] * len(given))]
        found[kind] = [
            {
                "tokens": list(answer.token_ids),
                "near": [
                    {
                        str(token): round(likeliest[chosen].logprob - other.logprob, 4)
                        for token, other in likeliest.items()
                        if token != chosen and likeliest[chosen].logprob - other.logprob <= NEAR
                    }
                    for chosen, likeliest in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
            }
            for answer in answers
        ]
    return found


def compare(document: dict[str, Any]) -> None:
    """Add ``equal_answers`` and ``parted``, compared with the first contestant of the same weights."""
    first: dict[bool, dict[str, Any]] = {}
    written = document.get("written", False)
    for name, found in document["results"].items():
        found["equal_answers"], found["parted"] = {}, {}
        if found["greedy"]:  # else it failed
            first.setdefault(written or name.startswith("flashtile"), found["greedy"])
        reference = first.get(written or name.startswith("flashtile"), {})
        for kind, answers in found["greedy"].items():
            pairs = list(zip(answers, reference[kind], strict=True))
            other = [pair for pair in pairs if pair[0]["tokens"] != pair[1]["tokens"]]
            found["equal_answers"][kind] = 1 - len(other) / len(pairs)
            found["parted"][kind] = [parting(*pair) for pair in other]
        both = zip(*(found["greedy"].get(kind, []) for kind in (ALONE, SHARED)), strict=False)
        same = [alone["tokens"] == shared["tokens"] for alone, shared in both]
        found["blind_answers"] = sum(same) / max(len(same), 1)


def parting(own: dict[str, Any], other: dict[str, Any]) -> tuple[int, float | None]:
    """Return (place of the first other token, difference of the two tokens there if they are near)."""
    tokens_of_both = list(zip(own["tokens"], other["tokens"], strict=True))
    place = next(i for i, (mine, theirs) in enumerate(tokens_of_both) if mine != theirs)
    return place, own["near"][place].get(str(other["tokens"][place]))


def new_document(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": "beside-vllm", "versions": machine.versions(), "source": source_commit(),
        "device": machine.describe_device(machine.find_device(None)), "model": options.model,
        "written": options.written, "new": options.new, "results": {},
    }  # fmt: skip


def keep(options: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    """Write what is known of a contestant to the file, beside the others' results."""
    known = options.json.exists()
    document = json.loads(options.json.read_text()) if known else new_document(options)
    empty: dict[str, Any] = {"greedy": {}, "first_round": {}, "rounds": {}}
    document["results"][name] = document["results"].get(name, empty) | found
    compare(document)
    replace_file(options.json, json.dumps(document) + "\n")


def run(options: argparse.Namespace) -> None:
    """Measure one engine, and write the new tokens per second of each workload and its greedy answers."""
    name, _, variant = options.engine.partition("+")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(options.model, Path(place), weights=options.written)
        if name == "flashtile":
            generate = flashtile_engine(folder, options, variant == "invariant")
        else:
            generate = vllm_engine(folder, options, name)
    seconds = time.perf_counter() - begun
    greedy = greedy_answers(generate, options.model)
    found: dict[str, Any] = {
        "seconds_to_start": seconds, "greedy": greedy, "first_round": {}, "rounds": {},
    }  # fmt: skip
    keep(options, options.engine, found)
    for workload in options.workloads.split(","):
        for turn in range(options.rounds + 1):
            measured = rate(generate, workload, options, turn)
            if turn == 0:  # it compiles
                found["first_round"][workload] = measured
            else:
                found["rounds"].setdefault(workload, []).append(measured)
            print(f"{options.engine:20} {workload:16} {turn} {measured:10,.0f} new tokens/s", flush=True)
            keep(options, options.engine, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contestants", default=CONTESTANTS)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--model", default="llama-3-8b", choices=list(SERVED))
    parser.add_argument("--written", action="store_true", help="the same weights for all, from a file")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer to a shared prompt")
    parser.add_argument("--seqs", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--more", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--ours", default="{}", help="further arguments of flashtile.LLM, as JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for workload in options.workloads.split(","):
        if not WORKLOAD.fullmatch(workload):
            parser.error(f"--workloads must be like those above, got {workload!r}")
    if options.engine is not None:
        run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.json = options.json or Path(folder) / "results.json"
        replace_file(options.json, json.dumps(new_document(options)) + "\n")
        for name in options.contestants.split(","):
            given = [*sys.argv[1:], "--engine", name, "--json", str(options.json)]
            environment = {
                **os.environ,
                "FLASHTILE_CASCADE_ATTENTION": str(int(name.endswith("+cascade"))),
                "VLLM_BATCH_INVARIANT": str(int(name.endswith("+invariant"))),
            }
            code = subprocess.run(
                [sys.executable, "-m", "benchmarks.beside_vllm", *given], env=environment
            ).returncode
            if code:
                keep(options, name, {"failed": f"exit code {code}"})
        for name, found in json.loads(options.json.read_text())["results"].items():
            equal, blind = found["equal_answers"], found["blind_answers"]
            print(f"{name:20} equal answers {equal} blind {blind} parted {found['parted']}")


if __name__ == "__main__":
    main()
