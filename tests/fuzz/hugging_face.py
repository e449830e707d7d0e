"""Family of Transformers' models: packed rows, windows and whole graphs, compared with eager attention."""

from __future__ import annotations

from random import Random

from fuzz.runner import Call

WINDOW = ("sliding_window=window",)
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=16")
MODELS = {
    "llama": (), "gpt2": (), "persimmon": (), "olmo2": (), "mistral": WINDOW, "ministral": WINDOW, "phi3": WINDOW, "cohere2": WINDOW,
    "qwen2": (*WINDOW, "use_sliding_window=True", "max_window_layers=1"),
    "gemma2": (*WINDOW, "query_pre_attn_scalar=16"), "gemma3_text": (*WINDOW, "query_pre_attn_scalar=16"),
    "phimoe": (*WINDOW, "num_local_experts=4"),
    "qwen2_moe": (*WINDOW, "use_sliding_window=True", "max_window_layers=1", *EXPERTS, "shared_expert_intermediate_size=16"),
}  # fmt: skip
WINDOWS_OF_MASKS = ("phimoe", "qwen2_moe")
"""Models that shared_prompts refuses, because their attention does not know their windows."""
COMPILED = 0.05
"""Share of the calls that are compiled, which takes seconds."""


def _positions(rng: Random, length: int) -> list[int]:
    """Draw the positions of a row: pieces that begin anywhere, the first as well."""
    row: list[int] = []
    while len(row) < length:
        begin = rng.choice([0, 0, rng.randint(0, 5)])
        row += range(begin, begin + rng.randint(1, length))
    return row[:length]


def draw(rng: Random, device: str = "cpu") -> Call:
    name, length, batch = rng.choice(list(MODELS)), rng.randint(2, 20), rng.randint(1, 3)
    rows = rng.choice([batch, batch, batch, 1])
    options = [*MODELS[name]]
    if name not in WINDOWS_OF_MASKS and rng.random() < 0.2:
        answers = [[rng.randint(1, 9) for _ in range(rng.randint(1, 4))] for _ in range(batch)]
        body = f"""from fuzz.models import shared_differs
shared_differs({name!r}, {[rng.randint(1, 20) for _ in answers]}, {answers}, seed={rng.randrange(99)}, device={device!r}, OPTIONS)"""
        return Call(body, {"window": rng.randint(1, 12)}, {}, tuple(options))
    if rng.random() < 0.8:
        options.append(f"positions={[_positions(rng, length) for _ in range(rows)]}")
    if rng.random() < COMPILED:
        options.append("compiled=True")
    body = f"""from fuzz.models import packed_differs
packed_differs({name!r}, batch={batch}, length={length}, seed={rng.randrange(99)}, device={device!r}, OPTIONS)"""
    return Call(body, {"window": rng.randint(1, 12)}, {}, tuple(options))
