"""Trains a small Llama on answers to prompts, each prompt computed once or again for each answer.

    python examples/shared_prompts.py                        # seconds on two cores
    python examples/shared_prompts.py --device cuda --layers 8 --hidden 2048 --heads 16 --kv-heads 4 \
        --prompts 4 --answers 8 --prompt-tokens 2048 --answer-tokens 256

Two copies of one model learn from the same steps, as GRPO makes them (Shao et al. 2024, arXiv:2402.03300):
each answer's tokens become more or less likely by the answer's advantage. One copy gets the batch of
``shared_prompts``. The other gets a packed row in which each answer follows its own copy of the prompt,
without padding. Prints both losses in each step, and the tokens, the time and the memory of a step.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from flashtile.hardware.machine import find_device
from flashtile.integrations.transformers import register, shared_prompts

Prompts = list[list[int]]
Answers = list[list[list[int]]]


class Way:
    """One way to compute a step, with its own copy of the model."""

    def __init__(self, name: str, model: PreTrainedModel, log_probs: Callable[..., tuple[Tensor, int]]):
        self.name, self.model, self.log_probs = name, copy.deepcopy(model), log_probs
        # SGD, because steps of Adam depend on the signs of gradients, also of those that are nearly 0.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds: list[float] = []
        self.tokens = self.memory = 0

    def step(self, prompts: Prompts, answers: Answers, advantages: Tensor) -> float:
        """Learn from one batch, with an advantage for each answer. Return the loss."""
        synchronize(self.model.device)
        began, saved = time.perf_counter(), Saved()
        with saved:
            log_probs, self.tokens = self.log_probs(self.model, prompts, answers)
            lengths = torch.tensor([len(answer) for of_prompt in answers for answer in of_prompt])
            of_tokens = advantages.repeat_interleave(lengths).to(log_probs)
            loss = -(of_tokens * log_probs).mean()  # on-policy, so the ratio of probabilities is 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.model.device)
        self.seconds.append(time.perf_counter() - began)
        self.memory = saved.total
        return loss.item()


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass keeps for the backward pass, weights included."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def shared(model: PreTrainedModel, prompts: Prompts, answers: Answers) -> tuple[Tensor, int]:
    """Return the log-probabilities of the answers' tokens and the number of tokens that layers compute."""
    batch = shared_prompts(model, prompts, answers)
    return batch.log_probs(model(**batch).logits), batch.input_ids.numel()


def separate(model: PreTrainedModel, prompts: Prompts, answers: Answers) -> tuple[Tensor, int]:
    """Do the same as :func:`shared` with a prompt for each answer, packed into one row."""
    paths = [(p, answer) for p, of_prompt in zip(prompts, answers, strict=True) for answer in of_prompt]
    tokens: list[int] = []
    positions: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    for prompt, answer in paths:
        path = [*prompt, *answer[:-1]]
        kept += range(len(tokens) + len(prompt) - 1, len(tokens) + len(path))
        tokens += path
        positions += range(len(path))
        targets += answer
    numbers = [torch.tensor(given, device=model.device) for given in (tokens, positions, kept, targets)]
    logits = model(
        numbers[0][None], position_ids=numbers[1][None], logits_to_keep=numbers[2], use_cache=False
    ).logits[0]
    return -torch.nn.functional.cross_entropy(logits.float(), numbers[3], reduction="none"), len(tokens)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 2,
    answers: Annotated[int, typer.Option(min=1, help="Answers to a prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 192,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads.")] = 2,
    vocabulary: Annotated[int, typer.Option(min=2, help="Number of tokens in the vocabulary.")] = 256,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if present.")] = None,
) -> None:
    """Train both ways, in float32 on a CPU and in bfloat16 on a GPU."""
    place = find_device(device)
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=prompt_tokens + answer_tokens,
    )
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile").to(place, dtype)
    ways = [Way("shared", model, shared), Way("separate", model, separate)]
    for step in range(steps):
        questions = torch.randint(vocabulary, (prompts, prompt_tokens)).tolist()
        lengths = torch.randint((answer_tokens + 1) // 2, answer_tokens + 1, (prompts, answers)).tolist()
        drawn = [[torch.randint(vocabulary, (n,)).tolist() for n in of_prompt] for of_prompt in lengths]
        advantages = torch.randn(prompts * answers)
        losses = [way.step(questions, drawn, advantages) for way in ways]
        print(
            f"step {step}: loss {losses[0]:.6f} shared, {losses[1]:.6f} separate, "
            f"difference {abs(losses[0] - losses[1]):.1e}"
        )
    for way in ways:
        # The first step of a kernel compiles it.
        seconds = statistics.median(way.seconds[1:] or way.seconds)
        print(
            f"{way.name}: {way.tokens} tokens, {seconds * 1e3:.1f} ms a step, "
            f"{way.memory / 2**20:.1f} MiB kept for the backward pass"
        )


if __name__ == "__main__":
    typer.run(main)
