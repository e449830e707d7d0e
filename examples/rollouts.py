"""Reinforcement learning of a small language model: the engine draws groups, Transformers computes the loss.

    python examples/rollouts.py                              # ten seconds on two idle cores
    python examples/rollouts.py --steps 20 --device cuda     # on a GPU: bfloat16 and the GPU kernels

Each step is one of GRPO (Shao et al. 2024, arXiv:2402.03300): the engine samples several answers to each
prompt, and the trainer makes those with more reward than others of their prompt more likely. The model
is random, so that nothing is downloaded. An answer is rewarded for its share of tokens below 64.

The first step compares three log-probabilities of each token: those that the engine drew with, those of
``LLM.score``, which have the same bits, and those of the trainer, which are equal up to rounding.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from flashtile import LLM, SamplingParams
from flashtile.hardware.machine import find_device
from flashtile.integrations.transformers import register, shared_prompts

VOCABULARY = 256
REWARDED = 64
"""Tokens below this number are rewarded."""


class Group:
    """A prompt, its answers, their log-probabilities when they were drawn, and their advantages."""

    def __init__(self, prompt: list[int], answers: list[list[int]], drawn: list[list[float]]):
        self.prompt, self.answers, self.drawn = prompt, answers, drawn
        rewards = torch.tensor([sum(token < REWARDED for token in one) / len(one) for one in answers])
        self.reward = float(rewards.mean())
        self.advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()


def sample(llm: LLM, prompts: list[list[int]], count: int, length: int, seed: int) -> list[Group]:
    """Draw ``count`` answers to each prompt."""
    params = SamplingParams(
        n=count, temperature=1.0, max_tokens=length, logprobs=0, seed=seed, ignore_eos=True, detokenize=False
    )
    groups = []
    for output in llm.generate(prompts, params):
        assert output.prompt_token_ids is not None
        answers = [list(one.token_ids) for one in output.outputs]
        drawn = [
            [entry[token].logprob for entry, token in zip(one.logprobs or (), one.token_ids, strict=True)]
            for one in output.outputs
        ]
        groups.append(Group(output.prompt_token_ids, answers, drawn))
    return groups


def log_probabilities(model: PreTrainedModel, groups: list[Group]) -> Tensor:
    """Return the log-probabilities of all answers' tokens, with gradients, in one call of the model."""
    batch = shared_prompts(model, [group.prompt for group in groups], [group.answers for group in groups])
    return batch.log_probs(model(**batch).logits)


def check(llm: LLM, model: PreTrainedModel, groups: list[Group]) -> None:
    """Compare the log-probabilities of the engine's draws with those of its score and of the trainer."""
    paths = [(group.prompt, answer) for group in groups for answer in group.answers]
    scores = llm.score([[*prompt, *answer] for prompt, answer in paths])
    scored = [
        number for (prompt, _), one in zip(paths, scores, strict=True) for number in one[len(prompt) - 1 :]
    ]
    drawn = [number for group in groups for one in group.drawn for number in one]
    different = sum(one != other for one, other in zip(drawn, scored, strict=True))
    print(f"{len(drawn)} log-probabilities; other bits in LLM.score: {different}")
    assert different == 0

    # Exact: the same weights in float64 with standard attention. The error rule allows twice the error that
    # standard attention makes in the dtype of the model, and one rounding.
    standard = copy.deepcopy(model)
    standard.set_attn_implementation("eager")
    plain, exact = (reference(one, paths) for one in (standard, copy.deepcopy(standard).double()))
    found = {
        "engine": torch.tensor(drawn).double(),
        "trainer": log_probabilities(model, groups).double().cpu(),
    }
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(model.dtype).eps * exact.abs().max()
    for name, numbers in found.items():
        error = (numbers.detach() - exact).abs().max()
        print(f"largest error of the {name}: {error:.1e}, allowed {allowed:.1e}")
        assert error <= allowed


@torch.no_grad()
def reference(model: PreTrainedModel, paths: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the log-probabilities of all answers' tokens, one answer at a time."""
    found = []
    for prompt, answer in paths:
        tokens = torch.tensor([[*prompt, *answer]], device=model.device)
        chosen = model(tokens, use_cache=False).logits[0].double().log_softmax(-1)
        found.append(chosen[:-1].gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0])
    return torch.cat(found).cpu()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 4,
    answers: Annotated[int, typer.Option(min=2, help="Answers to a prompt.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda if present.")] = None,
) -> None:
    """Train, and print tokens/s of sampling and of training, and the mean reward."""
    place = find_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile").to(place, dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            Path(folder),
            device=str(place),
            skip_tokenizer_init=True,
            batch_invariant=True,
            kv_cache_memory_bytes=2**26,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(steps):
        questions = torch.randint(VOCABULARY, (prompts, 32)).tolist()
        start = time.perf_counter()
        groups = sample(llm, questions, answers, length, seed=step)
        sampled = time.perf_counter()
        if step == 0:
            check(llm, model, groups)
        begin = time.perf_counter()
        found = log_probabilities(model, groups)
        drawn = torch.tensor([number for group in groups for one in group.drawn for number in one])
        advantages = torch.tensor([a for group in groups for a in group.advantages]).repeat_interleave(length)
        # The ratio of new and old probabilities: 1 up to rounding, because each step has new answers.
        ratio = torch.exp(found - drawn.to(place))
        loss = -(ratio * advantages.to(place)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        llm.update_weights(model.named_parameters())
        trained = time.perf_counter()
        tokens = prompts * answers * length
        reward = sum(group.reward for group in groups) / len(groups)
        print(
            f"step {step}: reward {reward:.3f}, sampled {tokens / (sampled - start):.0f} tokens/s, "
            f"trained {tokens / (trained - begin):.0f} tokens/s"
        )


if __name__ == "__main__":
    typer.run(main)
