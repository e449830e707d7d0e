"""Functions of scores and masks that every backend is held to, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import masks

HEADS, SEQLEN_Q, SEQLEN_K = 4, 37, 45


class Functions(NamedTuple):
    """Arguments of ``flashtile.attention``, and the captured tensors that learn."""

    arguments: dict[str, Any]
    learned: tuple[Tensor, ...] = ()


def _random(*shape: int, device: str, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def documents(device: str) -> Tensor:
    """(2, SEQLEN_K) ids, other lengths in each sequence."""
    ids = torch.zeros(2, SEQLEN_K, dtype=torch.int32)
    ids[0, 10:] = 1
    ids[0, 31:] = 7
    ids[1, 22:] = 5
    return ids.to(device)


def _alibi(device: str) -> Functions:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    return Functions({"score_mod": masks.alibi(slopes, offset=8)}, (slopes,))


def _relative(device: str) -> Functions:
    bias = _random(HEADS, 15, device=device)
    return Functions({"score_mod": masks.relative_position(bias), "causal": True}, (bias,))


def _swin(device: str) -> Functions:
    """A bias of rows and keys, in half precision, and a learnable temperature."""
    table = _random(HEADS, SEQLEN_Q, SEQLEN_K, device=device).half()
    temperature = torch.tensor(0.75, device=device)

    def modify(score, batch, head, q_idx, kv_idx):
        return score * temperature + table[head, q_idx, kv_idx]

    return Functions({"score_mod": modify}, (temperature, table))


def _many(device: str) -> Functions:
    """Whatever the language has, of values that depend on few and on many indices."""
    per_row = _random(2, SEQLEN_Q, device=device).abs()
    per_key = _random(SEQLEN_K, device=device)
    power = 3

    def inner(x, q_idx):
        return torch.sigmoid(x) * torch.where(q_idx % 3 == 1, 2.0, x.abs())

    def modify(score, batch, head, q_idx, kv_idx):
        x = score / (1 + per_row[batch, q_idx]) + per_key[-1 - kv_idx // 2]
        x = torch.maximum(x, torch.minimum(0.5 * x, -x)) - inner(score, q_idx) ** power
        x = (
            x
            + torch.exp(-(((q_idx - kv_idx) // 4).float() ** 2)) * (head + 1)
            + torch.log(1.5 + score * score)
        )
        return x.clamp(-20, 20) + torch.sqrt((kv_idx + 1).to(torch.float32)) / 8 + torch.sin(score)

    return Functions({"score_mod": modify}, (per_row, per_key))


def _by_scores(device: str) -> Functions:
    """A mask within the score, which leaves rows without keys."""

    def modify(score, batch, head, q_idx, kv_idx):
        return torch.where((kv_idx < q_idx - 3 * head) | (score > 2.5), score.tanh(), -float("inf"))

    return Functions({"score_mod": modify})


def _signs_of_zero(device: str) -> Functions:
    """A zero of ints has no sign; that of a negated float has one."""

    def modify(score, batch, head, q_idx, kv_idx):
        distance = q_idx - kv_idx
        score = torch.where(1 / -distance > 0, score + 1, score)
        return torch.where(1 / -distance.float() < 0, score - 2, score)

    return Functions({"score_mod": modify})


def _document(device: str) -> Functions:
    ids = documents(device)
    return Functions({"mask_mod": masks.document(ids) & masks.causal()})


def _nothing(device: str) -> Functions:
    return Functions({"mask_mod": lambda batch, head, q_idx, kv_idx: (kv_idx < 0) | (q_idx * head == 6)})


def _of_mask(mask: Callable[..., Any]) -> Callable[[str], Functions]:
    return lambda device: Functions({"mask_mod": mask(device)})


MODS: dict[str, Callable[[str], Functions]] = {
    "causal": _of_mask(lambda device: masks.causal()),
    "window": _of_mask(lambda device: masks.window(6, 3, offset=8)),
    "prefix-lm": _of_mask(lambda device: masks.prefix_lm(torch.tensor([4, 19], device=device))),
    "document": _document,
    "dilated": _of_mask(lambda device: masks.dilated(3, 4)),
    "natten": _of_mask(lambda device: masks.natten(9, 5, 3)),
    "padding": _of_mask(lambda device: masks.padding(torch.tensor([45, 13], device=device))),
    "not": _of_mask(lambda device: ~(masks.window(6, 6) | masks.prefix_lm(9)) & masks.mask_mod(_of_head)),
    "no-keys": _nothing,
    "softcap": lambda device: Functions({"score_mod": masks.softcap(1.5), "window_size": (9, 4)}),
    "alibi": _alibi,
    "relative": _relative,
    "swin": _swin,
    "many": _many,
    "by-scores": _by_scores,
    "signs-of-zero": _signs_of_zero,
    "both": lambda device: Functions(
        {"score_mod": _relative(device).arguments["score_mod"], **_document(device).arguments, "softcap": 4.0}
    ),
}


def _of_head(batch, head, q_idx, kv_idx):
    return (kv_idx + head) % 2 == batch
