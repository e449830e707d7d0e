"""flashtile's engine beside vLLM's, and vLLM with flashtile's attention: new tokens per second of one GPU.

    python -m benchmarks.beside_vllm --json beside_vllm.json
    python -m benchmarks.beside_vllm --contestants FLASH_ATTN,CUSTOM+cascade --workloads 32x8x1024
    python -m benchmarks.beside_vllm --model qwen3-0.6b --contestants flashtile,FLASH_ATTN --workloads steps64

Each contestant is an engine of its own, in a process of its own, one after the other: ``flashtile`` is
:class:`flashtile.LLM`, the other names are attention backends of ``vllm.LLM``, of which ``CUSTOM`` is
flashtile's. ``+cascade`` sets ``FLASHTILE_CASCADE_ATTENTION=1``, ``+invariant`` asks either engine for
results that do not depend on the batch. All other options are each engine's own. The model has random
weights.

The workloads, all with ``ignore_eos``:

    32x8x1024        8 sampled answers to each of 32 prompts of 1,024 tokens. A fourth number is the number of
                     tokens with which all prompts begin.
    requests1000     1,000 sampled requests of ShareGPT-like lengths: 161 and 338 tokens on average
    greedy1000       the same, greedy
    prompts32x8000   32 greedy requests of 8,000 tokens, with 64 new tokens each
    steps64          greedy steps of 64 sequences behind 1,024 tokens: the difference of two runs, so without
                     prompts

``equal_answers`` is the share of greedy answers to the same 32 prompts with the tokens of the first
contestant. Answers part at ties.
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
from flashtile.hardware import machine

CONTESTANTS = "flashtile,FLASH_ATTN,CUSTOM,CUSTOM+cascade"
WORKLOADS = "32x8x1024,8x16x4096,256x1x1024,32x8x1024x512,requests1000,greedy1000,prompts32x8000,steps64"
WORKLOAD = re.compile(r"(requests|greedy|steps)\d+|prompts\d+x\d+|\d+x\d+x\d+(x\d+)?")
Answers = list[list[list[int]]]
Generate = Callable[[list[list[int]], list[dict[str, Any]]], Answers]


def flashtile_engine(folder: Path, options: argparse.Namespace, invariant: bool) -> Generate:
    from flashtile import LLM, SamplingParams

    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=options.seqs,
        enforce_eager=options.eager, batch_invariant=invariant, **json.loads(options.ours),
    )  # fmt: skip

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> Answers:
        outputs = llm.generate(prompts, [SamplingParams(**own) for own in params])
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    return generate


def vllm_engine(folder: Path, options: argparse.Namespace, backend: str) -> Generate:
    import vllm

    llm = vllm.LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=options.seqs,
        enforce_eager=options.eager, attention_backend=backend, **json.loads(options.more),
    )  # fmt: skip

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> Answers:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [vllm.SamplingParams(detokenize=False, **own) for own in params]
        outputs = llm.generate(given, wanted, use_tqdm=False)
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]

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
    made = [sum(map(len, answers)) for answers in outputs]
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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the new tokens per second of each workload, and greedy tokens, of one engine."""
    name, _, variant = options.engine.partition("+")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(options.model, Path(place))
        if name == "flashtile":
            generate = flashtile_engine(folder, options, variant == "invariant")
        else:
            generate = vllm_engine(folder, options, name)
    prompts = [tokens(200, SERVED[options.model][1], seed) for seed in range(32)]
    greedy = generate(prompts, [{"temperature": 0, "max_tokens": 64, "ignore_eos": True}] * len(prompts))
    results: dict[str, Any] = {
        "seconds_to_start": time.perf_counter() - begun,
        "greedy": greedy,
        "rounds": {},
    }
    for workload in options.workloads.split(","):
        rates = [rate(generate, workload, options, turn) for turn in range(options.rounds + 1)]
        results["rounds"][workload] = rates[1:]  # the first one compiles
        print(f"{options.engine:20} {workload:16} {max(rates[1:]):10,.0f} new tokens/s", flush=True)
        options.json.write_text(json.dumps(results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contestants", default=CONTESTANTS)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--model", default="llama-3-8b", choices=list(SERVED))
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
    document: dict[str, Any] = {
        "kind": "beside-vllm", "versions": machine.versions(), "source": source_commit(),
        "device": machine.describe_device(machine.find_device(None)), "model": options.model,
        "new": options.new, "results": {},
    }  # fmt: skip
    for name in options.contestants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            given = [*sys.argv[1:], "--engine", name, "--json", str(file)]
            environment = {
                **os.environ,
                "FLASHTILE_CASCADE_ATTENTION": str(int(name.endswith("+cascade"))),
                "VLLM_BATCH_INVARIANT": str(int(name.endswith("+invariant"))),
            }
            code = subprocess.run(
                [sys.executable, "-m", "benchmarks.beside_vllm", *given], env=environment
            ).returncode
            found = json.loads(file.read_text()) if file.exists() else {"rounds": {}, "greedy": []}
        if code:
            found["failed"] = f"exit code {code}"
        first = next(iter(document["results"].values()), found)["greedy"]
        equal = [one == other for one, other in zip(found["greedy"], first, strict=False)]
        found["equal_answers"] = sum(equal) / len(equal) if equal else None
        document["results"][name] = found
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
