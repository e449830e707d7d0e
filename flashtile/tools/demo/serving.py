"""Serves the trained model: a few requests to the engine, with their time and memory."""

from __future__ import annotations

import time
from pathlib import Path

from flashtile.engine import LLM, RequestOutput, SamplingParams
from flashtile.tools.demo.llama import Llama, save_llama

PROMPTS = (
    "class Reader:\n    def __init__(self",
    "class Reader:\n    def __init__(self, path):\n        ",
    "import os\nimport ",
)
"""Prompts. The second begins like the first, so the prefix cache already has the blocks of its beginning."""
MAX_TOKENS = 64
"""Largest number of tokens of an answer."""


def serve(model: Llama, folder: Path, seqlen: int, device: str) -> tuple[list[RequestOutput], list[str]]:
    """Write the model to ``folder``, load it into the engine, and generate two answers to each prompt.

    ``seqlen`` is the length of the longest text that the model was trained on.

    Returns:
        (outputs of the engine, lines that describe their time and memory).

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
    """
    save_llama(model, folder, seqlen)
    llm = LLM(folder, device=device, block_size=8, max_num_seqs=8, warmup=False)
    most = max(1, seqlen // 2)
    prompts = [prompt[:most] for prompt in PROMPTS]
    params = SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=min(MAX_TOKENS, seqlen - most))
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
    answers = [answer for output in done for answer in output.outputs]
    tokens = sum(len(answer.token_ids) for answer in answers)
    metrics = [output.metrics for output in done]
    saved = 1 - sum(one.blocks for one in metrics) / sum(one.unshared_blocks for one in metrics)
    cached = sum(output.num_cached_tokens for output in done)
    return done, [
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s), {len(answers)} answers to "
        f"{len(prompts)} prompts",
        f"at most {blocks} blocks of {manager.block_size} tokens; sharing saved {saved:.0%}, and {cached} "
        "tokens of prompts were found in the prefix cache",
    ]
