"""Masks in blocks: every block computed and masked, beside the lists of a block mask that leave some out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashtile import masks
from flashtile.algorithms import Memory, Trace
from flashtile.masks.block_mask import listed
from flashtile.masks.mods import MaskMod
from flashtile.visualizer.stories.case import Case

SEQLEN, HEAD_DIM, BLOCK = 128, 8, 16
SLOPE = 0.25
"""Of ALiBi."""


def _documents() -> MaskMod:
    starts = torch.tensor([0, 40, 48, 100])
    return masks.document((torch.arange(SEQLEN)[:, None] >= starts).sum(1)) & masks.causal()


MASKS: dict[str, Callable[[], MaskMod]] = {
    "causal": masks.causal,
    "window": lambda: masks.window(24, 0),
    "prefix": lambda: masks.prefix_lm(40),
    "document": _documents,
    "dilated": lambda: masks.dilated(8, 4),
    "alibi": masks.causal,
}
"""By the variant that shows it. ALiBi hides nothing: scores fall with the distance, here under causality."""


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, SEQLEN, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    return q, k, v


def attend(name: str, memory: Memory, in_lists: bool) -> Tensor:
    """FlashAttention-2 over the blocks of a mask's lists, or over all of them.

    ``in_lists``: empty blocks are left out, and only partial ones are masked, as the kernels do it.
    """
    q, k, v = inputs()
    Q, K, V = memory.place("Q", q), memory.place("K", k), memory.place("V", v)
    result = memory.empty("O", SEQLEN, HEAD_DIM, like=q)
    mask = MASKS[name]()
    blocks = masks.create_block_mask(mask, None, None, SEQLEN, SEQLEN, BLOCK_SIZE=BLOCK)
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)[0, 0].tolist()
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)[0, 0].tolist()
    for i in range(SEQLEN // BLOCK):
        rows = range(i * BLOCK, (i + 1) * BLOCK)
        with memory.sram() as sram:
            q_i = sram.load(Q, rows)
            m = sram.compute("m", torch.full((BLOCK, 1), torch.finfo(q.dtype).min), rows)
            total = sram.compute("l", torch.zeros(BLOCK, 1), rows)
            o = sram.compute("O", torch.zeros(BLOCK, HEAD_DIM), rows)
            for j in range(SEQLEN // BLOCK):
                keys = range(j * BLOCK, (j + 1) * BLOCK)
                if in_lists and not partial[i][j] and not full[i][j]:
                    memory.record("skip", "S", rows, keys)
                    continue
                k_j, v_j = sram.load(K, keys), sram.load(V, keys)
                s = sram.compute("S", q_i @ k_j.T * HEAD_DIM**-0.5, rows, keys, op="Q K^T")
                places = torch.tensor(rows)[:, None], torch.tensor(keys)
                if name == "alibi":
                    distance = (places[0] - places[1]).abs()
                    s = sram.compute("S", s - SLOPE * distance, rows, keys, op="alibi(S)")
                if partial[i][j] or not in_lists:
                    seen = torch.as_tensor(mask(0, 0, *places))
                    s = sram.compute("S", s.masked_fill(~seen, -torch.inf), rows, keys, op="mask(S)")
                m_new = torch.maximum(m, s.amax(1, keepdim=True))
                p = sram.compute("S", torch.exp(s - m_new), rows, keys, op="exp(S - m)")
                correction = torch.exp(m - m_new)
                total = sram.compute("l", total * correction + p.sum(1, keepdim=True), rows, op="l")
                o = sram.compute("O", o * correction + p @ v_j, rows, op="O + P V")
                m = sram.compute("m", m_new, rows, op="m")
            sram.store(result, o / total, rows)
    return result.tensor


def cases() -> Iterator[Case]:
    for variant in MASKS:
        for name in ("every", "lists"):
            trace = Trace()
            attend(variant, Memory(trace=trace), in_lists=name == "lists")
            yield Case(name, trace, {"seqlen": SEQLEN, "block": BLOCK}, variant)
