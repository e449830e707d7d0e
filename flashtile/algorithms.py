"""Public name of the papers' algorithms, which are in :mod:`flashtile.learn.algorithms`.

``import flashtile.algorithms.MODULE`` finds its modules as well.
"""

import sys

from flashtile.learn.algorithms import (
    Array,
    Event,
    Memory,
    Span,
    Sram,
    SramExceededError,
    Tile,
    Trace,
    call,
    flash1,
    flash2,
    flash3,
    flash3_fp8,
    flash3_schedule,
    flash_decoding,
    flops,
    memory,
    online_softmax,
    paged,
    product_chain,
    reservation,
    standard,
    tiled_matmul,
    trace,
    unified_max,
    warp_split,
    warps,
)

__all__ = ["Array", "Event", "Memory", "Span", "Sram", "SramExceededError", "Tile", "Trace"]

for _module in (
    call,
    flash1,
    flash2,
    flash3,
    flash3_fp8,
    flash3_schedule,
    flash_decoding,
    flops,
    memory,
    online_softmax,
    paged,
    product_chain,
    reservation,
    standard,
    tiled_matmul,
    trace,
    unified_max,
    warp_split,
    warps,
):
    sys.modules[_module.__name__.replace(".learn.", ".")] = _module
