"""Calls with functions of scores and masks in blocks as the Hopper kernels have them, 128 by 128 or more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import masks, testing
from flashtile.reference import attention as reference


@dataclass(frozen=True)
class ListedCall:
    """Shapes, and the arguments of ``flashtile.attention`` on a device."""

    arguments: Callable[[str], dict[str, Any]]
    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    """None is head_dim."""
    dtype: torch.dtype = torch.float16

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        def make(seqlen: int, heads: int, seed: int, columns: int = self.head_dim) -> Tensor:
            return testing.random_tensor((self.batch, seqlen, heads, columns), self.dtype, device, seed=seed)

        return (
            make(self.seqlen_q, self.heads_q, 1),
            make(self.seqlen_k, self.heads_kv, 2),
            make(self.seqlen_k, self.heads_kv, 3, self.head_dim_v or self.head_dim),
        )


def documents(seqlen: int, *starts: int, device: str, batch: int | None = None) -> Tensor:
    """Ids of documents that begin at 0 and at ``starts``; of ``batch`` sequences all alike."""
    ids = torch.zeros(seqlen, dtype=torch.int32)
    for start in starts:
        ids[start:] += 1
    return (ids if batch is None else ids.expand(batch, -1)).contiguous().to(device)


def listed(
    mask: Callable[[str], Any],
    seqlen_q: int,
    seqlen_k: int,
    size: int = 128,
    batch: int | None = None,
    heads: int | None = None,
    more: Callable[[str], dict[str, Any]] = lambda device: {},
    **shapes: Any,
) -> ListedCall:
    """A call with the block mask of ``mask(device)``."""

    def arguments(device: str) -> dict[str, Any]:
        block_mask = masks.create_block_mask(mask(device), batch, heads, seqlen_q, seqlen_k, device, size)
        return {"block_mask": block_mask, **more(device)}

    return ListedCall(arguments, seqlen_q, seqlen_k, batch=batch or 1, **shapes)


def _document(seqlen: int, *starts: int, batch: int | None = None) -> Callable[[str], Any]:
    return lambda device: masks.document(documents(seqlen, *starts, device=device, batch=batch))


def _causal_document(seqlen: int, *starts: int) -> Callable[[str], Any]:
    return lambda device: _document(seqlen, *starts)(device) & masks.causal()


def _relative(device: str) -> dict[str, Any]:
    return {"score_mod": masks.relative_position(torch.linspace(-2, 2, 34, device=device).view(2, 17))}


def _by_heads(batch, head, q_idx, kv_idx):
    return ((kv_idx // 128 + head + batch) % 3 != 0) | (kv_idx == q_idx)


def _by_scores(score, batch, head, q_idx, kv_idx):
    return torch.where((kv_idx < q_idx - 3 * head) | (score > 1.5), score.tanh(), -float("inf"))


def _of_keys(score, batch, head, q_idx, kv_idx):
    return 0.01 * kv_idx.float()


def _log_distance(score, batch, head, q_idx, kv_idx):
    return score - torch.log(1 + (q_idx - kv_idx).abs())


def _log_scores(score, batch, head, q_idx, kv_idx):
    return 0.5 * score - torch.log(1.0 + score * score) + torch.log2(1 + 0.25 * (kv_idx - q_idx + 9).abs())


def _compared_log(score, batch, head, q_idx, kv_idx):
    logarithm = torch.log2(1 + (q_idx - kv_idx).abs())
    return torch.where(logarithm > 4.3, score - 2.5, score - logarithm)


def _negated_distance(score, batch, head, q_idx, kv_idx):
    return torch.where(1 / -(q_idx - kv_idx) > 0, score + 2, score)  # 1 / 0 is positive, 1 / -0.0 is not


def _finite_fill(score, batch, head, q_idx, kv_idx):
    return torch.where(q_idx % 7 != 3, score, -1e3)  # rows of equal scores, not rows without keys


def _times(device: str) -> dict[str, Any]:
    times = 1_700_000_000 + torch.arange(300, dtype=torch.int32, device=device) // 3
    return {"score_mod": lambda s, b, h, q, kv: s + 0.1 * (times[kv] - times[q])}


def _wide_products(device: str) -> dict[str, Any]:
    ids = 2**23 + torch.arange(300, dtype=torch.int32, device=device)
    return {"mask_mod": lambda b, h, q, kv: (ids[kv] * kv - ids[q] * (q - kv)) // 4096 % 5 != 1}


def _bytes(device: str) -> dict[str, Any]:
    numbers = (torch.arange(300, device=device) * 7 % 50).to(torch.int8)
    flags = numbers % 3 != 1
    return {"mask_mod": lambda b, h, q, kv: flags[kv] & (numbers[kv] + q != numbers[q]) | (q == kv)}


def _but_one_key(batch, head, q_idx, kv_idx):
    return kv_idx != 5


SMALL_SCORES = (-1e7, -1e8, -(2.0**27), -1e9, -1e10, -1e38)
"""The forward kernels scale rows differently from 2 ** 27 on."""


def check_small_scores(q: Tensor, k: Tensor, v: Tensor, backend: str | None, small: float = -1e38) -> None:
    """Finite scores, as small as ``small``, are not hidden: rows of them give the mean of v.

    Gradients are not compared: at this size, lse in float32 does not depend on the number of keys.
    """

    fill = torch.full((q.shape[2],), small, device=q.device)  # compilers know no element of a tensor

    def modify(score, batch, head, q_idx, kv_idx):
        return torch.where(q_idx % 7 != 3, score, fill[head])

    def expected(*tensors: Tensor) -> Tensor:
        out, _ = reference.attention(*tensors)
        mean = tensors[2].mean(1, keepdim=True)
        out[:, 3::7] = mean.repeat_interleave(out.shape[2] // mean.shape[2], 2)
        return out

    with testing.poisoned_memory():
        out, lse = flashtile.attention(q, k, v, score_mod=modify, backend=backend, return_lse=True)
    exact, plain = expected(q.double(), k.double(), v.double()), expected(q, k, v)
    found = testing.compare("out", out, exact, plain)
    assert found.holds, str(found)
    torch.testing.assert_close(lse[..., 3::7], torch.full_like(lse[..., 3::7], small + math.log(k.shape[1])))


def check_gradients_beside_small_scores(
    q: Tensor, k: Tensor, v: Tensor, backend: str, small: float, bias: bool
) -> None:
    """Rows whose scores are all ``small`` add nothing to gradients, so no infinite P can spread."""

    def modify(score, batch, head, q_idx, kv_idx):
        return torch.where(q_idx % 7 != 3, score, small)

    rows = q.shape[1]
    if bias:
        columns = (k.shape[1] + 7) // 8 * 8
        added = q.new_zeros(1, 1, rows, columns)
        added[:, :, 3::7] = small
        arguments: dict[str, Any] = {"bias": added[..., : k.shape[1]]}
    else:
        arguments = {"score_mod": modify}
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=q.device).to(q.dtype)
    others = dout.clone()
    others[:, 3::7] = 0

    def gradients(attend: Callable, dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    def plainly(*tensors: Tensor) -> Tensor:
        return reference.attention(*tensors)[0]

    found = gradients(partial(flashtile.attention, backend=backend, **arguments), dout, q, k, v)
    exact = gradients(plainly, others.double(), q.double(), k.double(), v.double())
    plain = gradients(plainly, others, q, k, v)
    for name, own, of_double, of_torch in zip(("dq", "dk", "dv"), found, exact, plain, strict=True):
        comparison = testing.compare(name, own, of_double, of_torch)
        assert comparison.holds, str(comparison)


def full_by_its_lists(seqlen_q: int, seqlen_k: int, device: str) -> masks.BlockMask:
    """Every block is in the lists of full ones, which hide nothing, whatever the mask would."""
    block_mask = masks.create_block_mask(lambda b, h, q, kv: kv >= 0, None, None, seqlen_q, seqlen_k, device)
    return replace(block_mask, mask_mod=masks.mask_mod(_but_one_key))


WIDE = {"head_dim": 128, "dtype": torch.bfloat16}

LISTED_CALLS: dict[str, ListedCall] = {
    "causal": listed(lambda device: masks.causal(), 256, 256),
    "document": listed(_causal_document(384, 100, 250), 384, 384, **WIDE),
    "of-batch": listed(_document(384, 100, 250, batch=2), 256, 384, batch=2, heads_kv=2),
    "ragged-window": listed(lambda device: masks.window(150, 20, offset=200), 300, 500),
    "ragged-prefix": listed(lambda device: masks.prefix_lm(200), 300, 300),
    "ragged-in-a-full-block": listed(lambda device: masks.prefix_lm(330), 130, 330, **WIDE),
    "ragged-behind-a-partial-block": listed(lambda device: _but_one_key, 130, 330),
    "no-keys": listed(lambda device: lambda b, h, q, kv: kv < 0, 256, 256),
    "by-heads": listed(lambda device: _by_heads, 256, 512, batch=2, heads=2, heads_kv=2),
    "blocks-of-256": listed(_document(600, 300), 512, 600, size=256),
    "dilated": listed(lambda device: masks.dilated(40, 4) & masks.causal(), 256, 256, heads_kv=2),
    "sink": listed(
        _document(256, 100), 256, 256, more=lambda device: {"sink": torch.tensor([0.5, -1.0], device=device)}
    ),
    "alibi": listed(
        lambda device: masks.causal(), 256, 256,
        more=lambda device: {"alibi_slopes": torch.tensor([0.1, 0.3], device=device)},
    ),
    "softcap": listed(_document(256, 100), 256, 256, more=lambda device: {"softcap": 3.0}),
    "negative-scale": listed(
        lambda device: masks.causal(), 256, 256, more=lambda device: {"softmax_scale": -0.3}
    ),
    "relative-document": listed(_causal_document(384, 100, 250), 384, 384, more=_relative),
    "mask-alone": ListedCall(lambda device: {"mask_mod": _by_heads}, 200, 300, batch=2),
    "mask-in-a-window": ListedCall(
        lambda device: {"mask_mod": _document(300, 100, 250)(device), "window_size": (150, 30)}, 300, 300
    ),
    "mask-causal": ListedCall(
        lambda device: {"mask_mod": _document(300, 100, 250)(device), "causal": True}, 300, 300, **WIDE
    ),
    "score-alone": ListedCall(_relative, 200, 300, **WIDE),
    "score-causal": ListedCall(
        lambda device: {**_relative(device), "causal": True}, 300, 300
    ),
    "score-in-a-window": ListedCall(
        lambda device: {"score_mod": masks.softcap(1.5), "window_size": (90, 40)}, 300, 300
    ),
    "score-that-hides": ListedCall(lambda device: {"score_mod": _by_scores}, 150, 200),
    "log-distance": ListedCall(lambda device: {"score_mod": _log_distance}, 150, 260, **WIDE),
    "log-of-scores": ListedCall(lambda device: {"score_mod": _log_scores, "causal": True}, 200, 200),
    "log-negative-scale": ListedCall(
        lambda device: {"score_mod": _log_distance, "softmax_scale": -0.3}, 150, 200
    ),
    "log-tiny-scale": ListedCall(lambda device: {"score_mod": _log_scores, "softmax_scale": 1e-5}, 150, 200),
    "compared-log": ListedCall(lambda device: {"score_mod": _compared_log}, 200, 300, **WIDE),
    "negated-distance": ListedCall(lambda device: {"score_mod": _negated_distance}, 150, 200),
    "finite-fill": ListedCall(lambda device: {"score_mod": _finite_fill}, 150, 200),
    "times": ListedCall(_times, 300, 300),
    "wide-products": ListedCall(_wide_products, 300, 300),
    "bytes": ListedCall(_bytes, 200, 300),
    "score-of-keys": ListedCall(lambda device: {"score_mod": _of_keys}, 150, 200),
}  # fmt: skip
"""Small enough to be interpreted."""

MANY_TILES: dict[str, ListedCall] = {
    "documents": listed(
        _causal_document(4096, 300, 900, 1700, 3000), 4096, 4096, heads_q=8, heads_kv=2, **WIDE
    ),
    "window": listed(lambda device: masks.window(1023, 0), 4096, 4096, heads_q=8, heads_kv=8),
    "ragged": listed(lambda device: masks.prefix_lm(1000), 3000, 4001, batch=3, heads_q=8, heads_kv=2),
    "relative": listed(
        _causal_document(2048, 300, 900), 2048, 2048, batch=4, heads_q=12, heads_kv=12, **WIDE,
        more=lambda device: {
            "score_mod": masks.relative_position(torch.linspace(-2, 2, 204, device=device).view(12, 17))
        },
    ),
}  # fmt: skip
"""More work tiles than a card has multiprocessors."""
