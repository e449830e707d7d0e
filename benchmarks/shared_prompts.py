"""Measures whole layers that train on answers to a prompt, which is computed once or for each answer.

    python -m benchmarks.shared_prompts --json shared_prompts.json     # on a GPU
    python -m benchmarks.shared_prompts --device cpu --hidden 64 --heads 4 --kv-heads 2 --prompt-tokens 64 \
        --answer-tokens 8 --rounds 1 --rep 1

Layers are those of Llama with the sizes of Llama-3-8B: attention, MLP and norms, without head, both passes,
with gradients of all weights. The contestants are ``shared_prompts`` and a batch with a row for each answer,
which follows its own copy of the prompt, with flashtile's and torch's attention. They run in rotation.
``speed`` is relative to the faster batch of rows. ``difference`` is the largest difference of the answers'
hidden states from flashtile's rows, relative to the largest state.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.suite.documents import source_commit
from benchmarks.suite.timing import release_memory
from flashtile.hardware import machine
from flashtile.hardware.timing import median_time, peak_allocated
from flashtile.integrations.transformers import register, shared_prompts

States = Callable[[], Tensor]
"""Computes the hidden states of all tokens that predict an answer's token, (answer tokens, hidden)."""

SHARED = "shared"
LARGE = 2048
"""Hidden size from which a CPU is refused."""


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 1,
    answers: Annotated[int, typer.Option(min=1, help="Answers to a prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size; the MLP has 3.5 times as many.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all contestants.")] = 5,
    rep: Annotated[float, typer.Option(help="Milliseconds to measure each contestant in a round.")] = 500.0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if present.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Print milliseconds of a layer, the speed relative to separate rows, and the peak memory."""
    place = machine.find_device(device)
    if place.type == "cpu" and hidden >= LARGE:
        raise typer.BadParameter(
            f"--hidden must be less than {LARGE} on a CPU, got {hidden}: a step of such layers takes minutes"
        )
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=prompt_tokens + answer_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile").to(place, dtype)
    questions = torch.randint(256, (prompts, prompt_tokens))
    drawn = torch.randint(256, (prompts, answers, answer_tokens))
    steps = contestants(model, questions, drawn)

    reference: Tensor | None = None
    results: dict[str, dict[str, Any]] = {}
    for name, (implementation, tokens, states) in steps.items():
        model.set_attn_implementation(implementation)
        found = states().detach()
        reference = found if reference is None else reference
        error = float((found - reference).abs().max() / reference.abs().max())
        weight = torch.randn_like(found)

        def step(states: States = states, weight: Tensor = weight) -> None:
            model.zero_grad()
            (states() * weight).sum().backward()

        step()
        release_memory(place)
        results[name] = {"tokens": tokens, "difference": error, "times_ms": [], "step": step}
        if place.type == "cuda":
            results[name]["peak_bytes"] = peak_allocated(step, place)
    for _ in range(rounds):
        for name, (implementation, *_) in steps.items():
            model.set_attn_implementation(implementation)
            results[name]["times_ms"].append(median_time(results[name]["step"], rep, place))
    for result in results.values():
        del result["step"]
        result["ms_per_layer"] = statistics.median(result["times_ms"]) / layers
    fastest = min(result["ms_per_layer"] for name, result in results.items() if name != SHARED)
    for result in results.values():
        result["speed"] = fastest / result["ms_per_layer"]
    Console().print(table(results))
    if json_file is not None:
        document = {
            "kind": "shared-prompts", "versions": machine.versions(),
            "device": machine.describe_device(place), "source": source_commit(),
            "shape": {
                "prompts": prompts, "answers": answers, "prompt_tokens": prompt_tokens,
                "answer_tokens": answer_tokens, "layers": layers, "hidden": hidden, "heads": heads,
                "kv_heads": kv_heads, "dtype": str(dtype),
            },
            "results": results,
        }  # fmt: skip
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def contestants(
    model: PreTrainedModel, questions: Tensor, drawn: Tensor
) -> dict[str, tuple[str, int, States]]:
    """Return (attention, tokens of a layer, function of the states) of each contestant.

    Args:
        questions: prompts, (prompts, prompt tokens).
        drawn: answers, (prompts, answers, answer tokens).
    """
    batch = shared_prompts(model, list(questions), list(drawn))
    given = {name: batch[name] for name in ("input_ids", "position_ids", "block_mask", "use_cache")}
    repeated = questions[:, None].expand(-1, drawn.shape[1], -1)
    rows = torch.cat((repeated, drawn[..., :-1]), 2).flatten(0, 1).to(model.device)
    first = questions.shape[1] - 1

    def shared() -> Tensor:
        return model.model(**given).last_hidden_state[0, batch.logits_to_keep]

    def separate() -> Tensor:
        return model.model(rows, use_cache=False).last_hidden_state[:, first:].flatten(0, 1)

    return {
        "separate": ("flashtile", rows.numel(), separate),
        "separate, sdpa": ("sdpa", rows.numel(), separate),
        SHARED: ("flashtile", batch.input_ids.numel(), shared),
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table("contestant", "tokens", "ms a layer", "speed", "difference", "peak GiB")
    for name, result in results.items():
        peak = f"{result['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in result else "-"
        shown.add_row(
            name, str(result["tokens"]), f"{result['ms_per_layer']:.3f}", f"{result['speed']:.2f}",
            f"{result['difference']:.1e}", peak,
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    typer.run(main)
