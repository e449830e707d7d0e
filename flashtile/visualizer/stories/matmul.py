"""C = alpha A B + beta C of 8 x 8 matrices: element by element, by thread blocks, by warps within them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashtile.algorithms import Memory, Trace, tiled_matmul
from flashtile.visualizer.stories.case import Case

SIZE = 8
STRIP = 4
TILES = {"element": (1, 1), "block": (4, 1), "warp": (4, 2)}
"""Sides of the square tiles of a thread block and of a warp."""

FACTORS = {"product": (1.0, 0.0), "scaled": (2.0, 0.5)}
"""alpha and beta."""


def cases() -> Iterator[Case]:
    a, b, c = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for variant, (alpha, beta) in FACTORS.items():
        for name, (block, warp) in TILES.items():
            trace = Trace()
            tiled_matmul.two_levels(
                a, b, Memory(trace=trace), c=c, alpha=alpha, beta=beta,
                block_m=block, block_n=block, block_k=STRIP, warp_m=warp, warp_n=warp,
            )  # fmt: skip
            facts = {"size": SIZE, "block": block, "warp": warp, "alpha": alpha, "beta": beta}
            yield Case(name, trace, facts, variant)
