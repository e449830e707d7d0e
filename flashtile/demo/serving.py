"""The trained model, served: a few requests through the engine, with what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flashtile.demo.huggingface import save_llama
from flashtile.demo.llama import Llama
from flashtile.engine import LLM, RequestOutput, SamplingParams

PROMPTS = (
    "class Reader:\n    def __init__(self",
    "class Reader:\n    def __init__(self, path):\n        ",
    "import os\nimport ",
)
"""The second begins as the first does: blocks of it are found again."""


@dataclass(frozen=True)
class Serving:
    """What was written, and how.

    Attributes:
        answers: (prompt, its answers).
        tokens, seconds: of all answers.
        blocks: most blocks of keys and values that were used at a time, of ``block_size`` tokens.
        memory_saved: share of them that the answers' sharing saved.
        found_tokens: tokens of prompts that the prefix cache had.
    """

    answers: list[tuple[str, list[str]]]
    tokens: int
    seconds: float
    blocks: int
    block_size: int
    memory_saved: float
    found_tokens: int

    def lines(self) -> list[str]:
        return [
            f"{self.tokens} tokens in {self.seconds:.1f} s ({self.tokens / self.seconds:.0f} tokens/s), "
            f"{sum(len(texts) for _, texts in self.answers)} answers to {len(self.answers)} prompts",
            f"at most {self.blocks} blocks of {self.block_size} tokens; "
            f"sharing saved {self.memory_saved:.0%}, and {self.found_tokens} tokens of prompts were found in "
            "the prefix cache",
        ]


def serve(model: Llama, folder: Path, seqlen: int, device: str, length: int = 64) -> Serving:
    """Write the model to ``folder`` and answer :data:`PROMPTS` with it, each twice.

    Args:
        seqlen: the longest text that it was trained on.
        length: tokens of an answer.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
    """
    save_llama(model, folder, seqlen)
    llm = LLM(folder, device=device, block_size=8, max_num_seqs=8)
    most = max(1, seqlen // 2)
    prompts = [prompt[:most] for prompt in PROMPTS]
    params = SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=min(length, seqlen - most))
    llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=1))  # whose blocks the second finds
    engine, manager = llm.engine, llm.engine.scheduler.manager
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    finished: dict[int, RequestOutput] = {}
    blocks, start = 0, time.perf_counter()
    while engine.has_unfinished:
        outputs = engine.step()
        blocks = max(blocks, manager.usage().blocks)
        finished |= {int(output.request_id): output for output in outputs if output.finished}
    seconds = time.perf_counter() - start
    done = [finished[i] for i in range(len(prompts))]
    metrics = [output.metrics for output in done]
    return Serving(
        answers=[(output.prompt or "", [one.text for one in output.outputs]) for output in done],
        tokens=sum(len(one.token_ids) for output in done for one in output.outputs),
        seconds=seconds,
        blocks=blocks,
        block_size=manager.block_size,
        memory_saved=1 - sum(one.blocks for one in metrics) / sum(one.unshared_blocks for one in metrics),
        found_tokens=sum(output.num_cached_tokens for output in done),
    )
