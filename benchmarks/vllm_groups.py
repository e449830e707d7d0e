"""Answers of shared prompts in vLLM: its own attention, flashtile's, and flashtile's with groups.

    python -m benchmarks.vllm_groups --json vllm_groups.json
    python -m benchmarks.vllm_groups --contestants FLASH_ATTN,CUSTOM+cascade --shapes 32x8x1024

Each contestant is an engine of its own, in a process of its own, one after the other on one GPU: vLLM's
attention backend of this name, ``+cascade`` with ``FLASHTILE_CASCADE_ATTENTION=1``. The model has random
weights. A shape is prompts x answers x tokens of a prompt, with a fourth number the tokens with which all
prompts begin. Answers are sampled, except for one greedy answer to each prompt of the first shape:
``equal_answers`` is the share of these with the tokens of the first contestant. Answers part at ties.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.suite.documents import source_commit
from benchmarks.suite.engine_bench import SERVED, tokens, write_model
from flashtile.hardware import machine

CONTESTANTS = "FLASH_ATTN,CUSTOM,CUSTOM+cascade"
SHAPES = "32x8x1024,8x16x4096,256x1x1024,32x8x1024x512"


def run(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Return the new tokens per second of each shape, and the greedy tokens, of one engine."""
    import vllm

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = vllm.LLM(
            str(write_model(options.model, Path(folder))), load_format="dummy", skip_tokenizer_init=True,
            attention_backend=backend, max_num_seqs=options.seqs, enforce_eager=options.eager,
            hf_overrides={"architectures": ["LlamaForCausalLM"]}, **json.loads(options.more),
        )  # fmt: skip
    results: dict[str, Any] = {"seconds_to_start": time.perf_counter() - begun, "rounds": {}}
    for number, shape in enumerate(options.shapes.split(",")):
        prompts, answers, length, *common = map(int, shape.split("x"))
        rates = []
        for turn in range(options.rounds + 1):  # the first one warms up
            drawn = [(number * 100 + turn) * 1000 + i for i in range(prompts + 1)]
            vocabulary, shared = SERVED[options.model][1], sum(common)
            system = tokens(shared, vocabulary, drawn[-1])
            given = [
                {"prompt_token_ids": system + tokens(length - shared, vocabulary, seed)}
                for seed in drawn[:-1]
            ]
            params = vllm.SamplingParams(
                n=answers,
                temperature=1.0,
                seed=turn,
                max_tokens=options.new,
                ignore_eos=True,
                detokenize=False,
            )
            if number == turn == 0:
                greedy = vllm.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
                outputs = llm.generate(given, greedy, use_tqdm=False)
                results["greedy"] = [list(output.outputs[0].token_ids) for output in outputs]
            begun = time.perf_counter()
            outputs = llm.generate(given, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            made = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
            rates.append(made / seconds)
        results["rounds"][shape] = rates[1:]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contestants", default=CONTESTANTS)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--model", default="llama-3-8b", choices=list(SERVED))
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--seqs", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--more", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        options.json.write_text(json.dumps(run(options, options.engine)))
        return
    found: dict[str, Any] = {}
    for name in options.contestants.split(","):
        backend, _, cascade = name.partition("+")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            given = [*sys.argv[1:], "--engine", backend, "--json", str(file)]
            environment = {**os.environ, "FLASHTILE_CASCADE_ATTENTION": "1" if cascade else "0"}
            subprocess.run(
                [sys.executable, "-m", "benchmarks.vllm_groups", *given], env=environment, check=True
            )
            found[name] = json.loads(file.read_text())
        greedy, expected = found[name]["greedy"], next(iter(found.values()))["greedy"]
        equal = [one == other for one, other in zip(greedy, expected, strict=True)]
        found[name]["equal_answers"] = sum(equal) / len(equal)
        for shape, rates in found[name]["rounds"].items():
            print(f"{name:16} {shape:16} {max(rates):10,.0f} new tokens/s", flush=True)
        print(f"{name:16} equal greedy answers: {found[name]['equal_answers']:.2f}", flush=True)
    if options.json is not None:
        document = {
            "kind": "vllm-groups", "versions": machine.versions(), "source": source_commit(),
            "device": machine.describe_device(machine.find_device(None)), "model": options.model,
            "new": options.new, "results": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
