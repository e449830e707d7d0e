"""Traffic between HBM and SRAM in standard attention's three kernels and in FlashAttention-2's one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import torch

from flashtile.algorithms import Memory, Trace, flash2, standard
from pictures.canvas import COLOURS, GREEN, INK, Say, box, heading, line, svg, text

ROWS, HEAD_DIM, SRAM_BYTES = 1024, 64, 100 * 1024
KERNEL, WIDTH, ROW = 330, 170, 46
"""Left edge and width of the kernels' boxes, and the height of a row."""

BYTES_PER_PIXEL = 2**20 / 110
MATRICES = {**COLOURS, "P": INK}


def moved(algorithm: ModuleType) -> dict[str, dict[str, Counter[str]]]:
    """Bytes of each matrix, by kernel in its order and by "load" or "store"."""
    trace = Trace()
    q, k, v = torch.zeros(3, ROWS, HEAD_DIM).unbind()
    algorithm.forward(q, k, v, Memory(SRAM_BYTES, trace=trace))
    kernels: dict[str, dict[str, Counter[str]]] = {}
    for event in trace.events:
        if event.kind in ("load", "store") and event.name in MATRICES:
            kernel = kernels.setdefault(event.kernel, {"load": Counter(), "store": Counter()})
            kernel[event.kind][event.name] += event.bytes
    return kernels


def bars(x: float, y: float, traffic: Counter[str], *, leftwards: bool) -> Iterator[str]:
    """One bar for each matrix, side by side."""
    for name, size in traffic.items():
        width = size / BYTES_PER_PIXEL
        begin = x - width if leftwards else x
        yield box(begin, y, width - 2, 24, MATRICES[name], name if width > 12 else "", size=11)
        x += -width if leftwards else width


def rows(y: float, title: str, algorithm: ModuleType, names: dict[str, str], say: Say) -> Iterator[str]:
    """A row for each kernel: read on its left, written on its right."""
    kernels = moved(algorithm)
    total = sum(sum(traffic.values()) for kernel in kernels.values() for traffic in kernel.values())
    yield heading(16, y, title)
    mebibytes = f"{total / 2**20:.1f} MiB"
    yield text(KERNEL + WIDTH + 290, y, say(f"{mebibytes} moved", f"共搬运 {mebibytes}"), anchor="end")
    for number, (kernel, traffic) in enumerate(kernels.items()):
        top = y + 16 + number * ROW
        yield box(KERNEL, top, WIDTH, 32, GREEN if len(kernels) == 1 else INK, names[kernel])
        yield from bars(KERNEL - 26, top + 4, traffic["load"], leftwards=True)
        yield line([(KERNEL - 24, top + 16), (KERNEL - 4, top + 16)], INK, tip=True)
        yield line([(KERNEL + WIDTH + 4, top + 16), (KERNEL + WIDTH + 24, top + 16)], INK, tip=True)
        yield from bars(KERNEL + WIDTH + 28, top + 4, traffic["store"], leftwards=False)


def picture(say: Say) -> str:
    three = {"S": "S = Q Kᵀ", "softmax": "P = softmax(S)", "O": "O = P V"}
    one = {"attention": say("all of it, tile by tile", "逐个 tile 一次完成")}
    parts = [
        text(KERNEL - 26, 20, say("read from HBM", "从 HBM 读取"), anchor="end", size=11),
        text(KERNEL + WIDTH + 28, 20, say("written to HBM", "写回 HBM"), size=11),
        *rows(48, say("Standard attention: three kernels", "标准注意力：三个内核"), standard, three, say),
        *rows(226, say("FlashAttention-2: one kernel", "FlashAttention-2：一个内核"), flash2, one, say),
    ]
    title = say(
        "Standard attention writes S and P to HBM and reads them again; FlashAttention-2 fuses its kernels",
        "标准注意力把 S 和 P 写回 HBM 再读出；FlashAttention-2 把三个内核融合为一个",
    )
    return svg(KERNEL + WIDTH + 306, 288, title, parts)
