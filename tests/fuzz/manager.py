"""Family of random operations on a paged cache, compared with plain lists of tokens."""

from __future__ import annotations

from random import Random

from fuzz.runner import Call

VOCABULARY = 2
"""Number of different tokens, which is small so that sequences share prefixes."""


def draw(rng: Random, device: str = "cpu") -> Call:
    def tokens(most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))]

    def pick() -> int:
        return rng.randrange(9)

    made = {
        "create": lambda: (tokens(25),), "step": lambda: ([pick() for _ in range(rng.randint(1, 4))], tokens(4)),
        "fork": lambda: (pick(),), "free": lambda: (pick(),), "truncate": lambda: (pick(), rng.choice([0, 0.5, 0.9])),
        "cache_blocks": lambda: (pick(),), "swap_out": lambda: (pick(),), "swap_in": lambda: (), "reset": lambda: (),
        "select": lambda: ([pick() for _ in range(3)], [pick() for _ in range(3)]),
    }  # fmt: skip
    names = rng.choices(list(made), [4, 8, 3, 2, 2, 3, 2, 2, 0.3, 1], k=rng.randint(5, 40))
    host, window = rng.choice([0, 20]), rng.choice([-1, -1, -1, 5])
    operations = [repr((name, *made[name]())) for name in names if host or "swap" not in name]
    body = f"""from fuzz.shadow import Shadow
Shadow(num_blocks={rng.randint(8, 40)}, block_size={rng.choice([1, 4, 4, 16])}, max_sequences={rng.randint(2, 8)}, num_host_blocks={host}, window_left={window}).do(
    OPTIONS
)"""
    return Call(body, {}, {}, tuple(operations), {}, ",\n    ")
