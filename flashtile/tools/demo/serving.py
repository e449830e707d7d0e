"""Serves the trained model: a few requests to the engine, with their time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flashtile.engine import LLM, RequestOutput, SamplingParams
from flashtile.tools.demo.llama import Llama, save_llama

PROMPTS = (
    "class Reader:\n    def __init__(self",
    "class Reader:\n    def __init__(self, path):\n        ",
    "import os\nimport ",
)
"""Prompts. The second begins like the first, so the prefix cache already has the blocks of its beginning."""


@dataclass(frozen=True)
class Serving:
    """Answers of the served model and their costs.

    Attributes:
        answers: (prompt, its answers) of each prompt.
        tokens, seconds: number of tokens of all answers, and the seconds to compute them.
        blocks: peak number of KV cache blocks in use, of ``block_size`` tokens each.
        memory_saved: share of the blocks that was saved because answers share blocks, from 0 to 1.
        found_tokens: number of prompt tokens that were found in the prefix cache.
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
    """Write the model to ``folder``, load it into the engine, and generate two answers to each prompt.

    The prompts are :data:`PROMPTS`.

    Args:
        seqlen: length of the longest text that the model was trained on.
        length: maximum number of tokens of an answer.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
    """
    save_llama(model, folder, seqlen)
    llm = LLM(folder, device=device, block_size=8, max_num_seqs=8, warmup=False)
    most = max(1, seqlen // 2)
    prompts = [prompt[:most] for prompt in PROMPTS]
    params = SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=min(length, seqlen - most))
    llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=1))  # fills the prefix cache
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
