"""Score and mask functions of the workloads ``masks``: typical FlexAttention functions at realistic sizes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import masks

SAMPLED_ROWS = 512
"""Maximum number of rows whose visible keys are counted.

The other rows are assumed to see as many keys on average.
"""


class Functions(NamedTuple):
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def document_ids(seqlen: int) -> Tensor:
    """Return the document number of each token, (seqlen,) int32.

    The lengths of documents are log-uniform from 64 to 4096 tokens.
    """
    draw = random.Random(0)
    ids = torch.empty(seqlen, dtype=torch.int32, device="cpu")
    start = number = 0
    while start < seqlen:
        length = round(64 * 64 ** draw.random())
        ids[start : start + length] = number
        start, number = start + length, number + 1
    return ids


ANSWERS = (512, 1021, 2048, 641, 1530, 899, 763, 1290)
"""Lengths of the eight answers to the prompt of a tree."""


def tree_segments(seqlen: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return (cu_seqlens, parent) of a tree of ``seqlen`` tokens: a prompt and eight answers to it.

    The answers are shorter than ``ANSWERS`` if these exceed 90 % of the tokens.
    """
    share = min(1.0, 0.9 * seqlen / sum(ANSWERS))
    answers = [int(share * length) for length in ANSWERS]
    lengths = torch.tensor([0, seqlen - sum(answers), *answers], dtype=torch.int32, device="cpu")
    parent = torch.tensor([-1] + [0] * len(answers), dtype=torch.int32, device="cpu")
    return lengths.cumsum(0, dtype=torch.int32).to(device), parent.to(device)


def _picture(seqlen: int) -> tuple[int, int]:
    """Return (height, width) of an image of ``seqlen`` tokens; the width is a power of two."""
    width = 1 << (seqlen.bit_length() // 2)
    return seqlen // width, width


def alibi_slopes(heads: int, device: Any) -> Tensor:
    """Return ALiBi's slopes (heads,), as in Press et al. 2022, section 3."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def _relative(heads: int, device: Any) -> Callable[..., Any]:
    return masks.relative_position(torch.linspace(-1, 1, heads * 257, device=device).view(heads, 257))


PICTURE = 280
"""Tokens of a picture."""


def _pictures(seqlen: int, device: Any) -> masks.MaskMod:
    """Return the mask of packed documents in which a picture's tokens see each other (Gemma 3 and 4).

    A picture follows each 280 tokens of text. A token of text has a number of its own instead of a picture's.
    """
    places = torch.arange(seqlen, dtype=torch.int32, device=device)
    pictures = torch.where(places // PICTURE % 2 == 1, places // PICTURE, -1 - places)
    documents = masks.document(document_ids(seqlen).to(device))
    return documents & (masks.causal() | masks.document(pictures))


def _window_by_head(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Hide keys beyond a window that grows by head. No block mask lists them, so no kernel skips them."""
    return torch.where(i - j < 128 * (h + 1), score, -torch.inf)


MODS: dict[str, Callable[[int, int, Any], Functions]] = {
    "causal": lambda s, h, device: Functions(mask_mod=masks.causal()),
    "window-1024": lambda s, h, device: Functions(mask_mod=masks.window(1023, 0)),
    "prefix-lm": lambda s, h, device: Functions(mask_mod=masks.prefix_lm(s // 4)),
    "document": lambda s, h, device: Functions(mask_mod=masks.document(document_ids(s).to(device))),
    "document-causal": lambda s, h, device: Functions(
        mask_mod=masks.document(document_ids(s).to(device)) & masks.causal()
    ),
    "dilated": lambda s, h, device: Functions(mask_mod=masks.dilated(256, 4) & masks.causal()),
    "global-window": lambda s, h, device: Functions(
        mask_mod=(masks.window(511, 0) | masks.mask_mod(lambda b, h, i, j: j < 64)) & masks.causal()
    ),
    "natten": lambda s, h, device: Functions(mask_mod=masks.natten(*_picture(s), 13 if s >= 1024 else 5)),
    "alibi-causal": lambda s, h, device: Functions(masks.alibi(alibi_slopes(h, device)), masks.causal()),
    "relative": lambda s, h, device: Functions(_relative(h, device)),
    "softcap-causal": lambda s, h, device: Functions(masks.softcap(30.0), masks.causal()),
    "relative-document": lambda s, h, device: Functions(
        _relative(h, device), masks.document(document_ids(s).to(device)) & masks.causal()
    ),
    "pictures": lambda s, h, device: Functions(mask_mod=_pictures(s, device)),
    "pictures-window-1024": lambda s, h, device: Functions(
        mask_mod=_pictures(s, device) & masks.window(1023, -1)
    ),
    "window-by-head": lambda s, h, device: Functions(_window_by_head, masks.causal()),
    "tree": lambda s, h, device: Functions(
        mask_mod=masks.create_tree_mask(*tree_segments(s, device), s).mask_mod
    ),
}
"""Functions ``(seqlen, heads, device) -> Functions`` by name."""


@functools.lru_cache(maxsize=64)
def visible_pairs(name: str, seqlen: int) -> int:
    """Estimate the number of visible (query, key) pairs of a sequence under a mask, from a sample of rows."""
    mask = MODS[name](seqlen, 1, "cpu").mask_mod
    if mask is None:
        return seqlen * seqlen
    rows = torch.linspace(0, seqlen - 1, min(SAMPLED_ROWS, seqlen), device="cpu").long()
    zero = torch.tensor(0, device="cpu")
    seen = sum(int(mask(zero, zero, row, torch.arange(seqlen, device="cpu")).sum()) for row in rows)
    return round(seen * seqlen / len(rows))
