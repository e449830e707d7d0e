"""Softmax of [1, 2, 3, 4] in two blocks: three passes, two, and one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashtile.algorithms import Memory, Trace, online_softmax
from flashtile.visualizer.stories.case import Case, numbers

ROWS = {"article": [1.0, 2.0, 3.0, 4.0], "large": [10.0, 20.0, 80.0, 100.0]}
"""exp(100) is beyond float32."""

VALUES = [10.0, 20.0, 30.0, 40.0]
"""What the one pass takes the weighted average of."""

BLOCK = 2


def cases() -> Iterator[Case]:
    for variant, row in ROWS.items():
        x, v = torch.tensor([row]), torch.tensor(VALUES)[:, None]
        for name in ("naive", "safe", "online"):
            trace = Trace()
            y = getattr(online_softmax, name)(x, Memory(trace=trace), block_n=BLOCK)
            yield Case(name, trace, {"x": row, "result": numbers(y[0])}, variant)
        trace = Trace()
        out = online_softmax.average(x, v, Memory(trace=trace), block_n=BLOCK)
        yield Case("average", trace, {"x": row, "v": VALUES, "result": numbers(out[0])}, variant)
