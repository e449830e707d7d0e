"""Family of draws of tokens: temperatures, filters, changed logits, ties, NaN, and rows without tokens.

The kernel, on a GPU or in Triton's interpreter, must draw what the torch form draws, and both what a sort in float64
allows. A token whose probability is within rounding of a filter's bound may be kept or not.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from flashtile.backends.portable import interpreting
from flashtile.engine import adjust, sampler
from fuzz.prelude import Wrong
from fuzz.runner import Call

SLACK = 1e-3
"""Relative difference of probabilities, and difference of scores, that rounding and other orders of sums may make."""


def logits_of(rows: int, vocab: int, shape: str, generator: torch.Generator) -> Tensor:
    normal = torch.randn(rows, vocab, generator=generator) * 3
    if shape == "ties":
        return normal.round()
    if shape == "few":
        return normal.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.95, -torch.inf)
    if shape == "empty":
        return normal.masked_fill(torch.rand(rows, 1, generator=generator) < 0.5, -torch.inf)
    if shape == "bad":
        bad = torch.tensor([torch.nan, -torch.nan, torch.inf, 3e38])[
            torch.randint(4, (rows, 1), generator=generator)
        ]
        at = torch.randint(vocab, (rows, 1), generator=generator)
        return normal.scatter(1, at, bad)
    return normal * {"flat": 0.1, "peaked": 9.0, "normal": 1.0}[shape]


def changes(rows: int, vocab: int, generator: torch.Generator, device: str) -> adjust.Adjusted:
    """Return changes of some rows: penalties, biases, allowed tokens, ends, and tokens that are not counted yet."""

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    room, width = min(vocab, 9), 2
    table = torch.stack([
        torch.stack([torch.randperm(vocab, generator=generator)[:room], ints(0, 32, room), torch.zeros(room).long()], 1)
        for _ in range(rows)
    ]).int()  # fmt: skip
    table[..., 2] = torch.randn(rows, room, generator=generator).view(torch.int32)
    known = ints(0, vocab, rows, 3).int()
    changed = torch.rand(rows, generator=generator) < 0.7
    changed[0] = True
    number = torch.where(changed, changed.cumsum(0) - 1, -1).int()
    at = changed.nonzero()
    unread = torch.where(ints(0, 2, len(at), width) > 0, ints(-3, vocab, len(at), width), adjust.NOTHING)
    numbers = torch.cat([at, at, ints(1, room + 1, len(at), 1), ints(0, 2, len(at), 2), unread], 1).int()
    penalties = torch.rand(len(at), 3, generator=generator) + 0.5
    return adjust.Adjusted(*(x.to(device) for x in (number, numbers, penalties, table, known)), room + width)


def bounds(scores: Tensor, choice: sampler.Choice, slack: float) -> Tensor:
    """Return which scores (rows, vocab), float64, all filters keep, with probabilities wrong by ``slack``."""
    top_k, top_p, min_p = (x.unsqueeze(1).double() for x in (choice.top_k, choice.top_p, choice.min_p))
    scores = torch.where(scores >= scores.amax(1, keepdim=True) + min_p.log() - slack, scores, -torch.inf)
    order = scores.sort(1, descending=True).values
    place = torch.searchsorted(-order, -scores)  # the number of better ones
    kept = (place < top_k) | (top_k == 0)
    weights = torch.exp(order - order[:, :1])
    last = torch.where(top_k == 0, order.shape[1], top_k.clamp(max=order.shape[1])).long() - 1
    weights = torch.where(order >= order.gather(1, last), weights, 0.0)
    better = torch.nn.functional.pad(weights.cumsum(1), (1, 0)).gather(1, place)
    unreached = (better == 0) | (better < top_p * weights.sum(1, keepdim=True) * (1 + slack))
    return kept & (unreached | (top_p >= 1)) & (scores > -torch.inf)


def _small_tiles(filtered: bool, vocab: int, adjusted: bool):
    from flashtile.engine.sampling import SamplingVariant

    return SamplingVariant(filtered or adjusted, 64, 128, adjusted)


def draws(
    rows: int, vocab: int, seed: int, device: str, shape: str = "normal", dtype: torch.dtype = torch.float32,
    temperature: tuple[float, ...] = (1.0,), top_k: tuple[int, ...] = (0,), top_p: tuple[float, ...] = (1.0,),
    min_p: tuple[float, ...] = (0.0,), seeds: int = 0, position: int = 0, adjusted: bool = False, strided: bool = False,
) -> None:  # fmt: skip
    """Draw a token of each row, and check them. Tuples are repeated row by row.

    Raises:
        Wrong: a token that a filter excludes was drawn, or the kernel and torch draw different ones.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = logits_of(rows, vocab, shape, generator).to(dtype).to(device)
    logits = torch.nn.functional.pad(logits, (1, 2), value=torch.inf)[:, 1:-2] if strided else logits

    def column(values: tuple, dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(rows)], dtype=dtype, device=device)

    choice = sampler.Choice(
        column(temperature, torch.float32), column(top_k, torch.int64), column(top_p, torch.float32), column(min_p, torch.float32),
        torch.arange(rows, device=device) * 7919 + seeds, not any(temperature), any(top_k), any(p < 1 for p in top_p), any(min_p),
    )  # fmt: skip
    positions = (torch.arange(rows, device=device) + position).int()
    change = changes(rows, vocab, generator, device) if adjusted else None
    changed = logits if change is None else change.apply(logits)
    noisy = sampler.noisy_scores(changed, choice, positions)
    found = {"torch": noisy.argmax(1)}
    if device != "cpu" or interpreting():
        from flashtile.engine import sampling

        if interpreting():  # which takes seconds for each large tile
            sampling.variant_of = _small_tiles
        before, filtered = logits.clone(), any((choice.any_top_k, choice.any_top_p, choice.any_min_p))
        found["the kernel"], _ = sampling.sample(logits, *choice[:5], positions, filtered, change)
        if not torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)):
            raise Wrong("the logits are changed")
    cold = torch.where(choice.temperature == 0, 1.0, choice.temperature).unsqueeze(1)
    scores = (changed.float() * cold.reciprocal()).double()
    is_bad = ~(scores < torch.inf)
    some, scores = (scores > -torch.inf).any(1) & ~is_bad.any(1), torch.where(is_bad, -torch.inf, scores)
    may, must = (bounds(scores, choice, slack) for slack in (SLACK, -SLACK))
    for name, tokens in found.items():
        at = tokens.unsqueeze(1)
        if not (is_bad.gather(1, at)[:, 0] | ~is_bad.any(1)).all():
            raise Wrong(f"{name} does not draw a logit that is NaN or infinite", str(tokens.tolist()))
        if not (may.gather(1, at)[:, 0] | ~some).all():
            raise Wrong(f"{name} draws a token that a filter excludes", str(tokens.tolist()))
        noise = sampler.gumbel(choice.seed, positions, vocab) * (choice.temperature > 0).unsqueeze(1)
        best = torch.where(must, scores + noise, -torch.inf).amax(1)
        if not ((scores + noise).gather(1, at)[:, 0] >= best - SLACK)[some].all():
            raise Wrong(f"{name} draws a token although another one is better", str(tokens.tolist()))


def draw(rng: Random, device: str = "cpu") -> Call:
    vocab = rng.choice([1, 2, 7, 50, 300, 3000, rng.randint(1, 5000)])
    if device != "cpu" and rng.random() < 0.2:
        vocab = rng.choice([32000, 128256, 131073])
    values = {
        "temperature": (0.0, 0.3, 1.0, 5.0), "top_k": (0, 1, 7, vocab, vocab + 9, 2**40),
        "top_p": (1.0, 0.95, 0.5, 1e-6, 1e-60), "min_p": (0.0, 0.3, 1.0),
    }  # fmt: skip
    options = [
        f"{name}={tuple(rng.choice(of) for _ in range(rng.randint(1, 3)))}"
        for name, of in values.items()
        if rng.random() < 0.5
    ]
    options.append(f"shape={rng.choice(['normal', 'flat', 'peaked', 'ties', 'few', 'empty', 'bad'])!r}")
    options += [f"dtype={rng.choice(['torch.bfloat16', 'torch.float16'])}"] * (rng.random() < 0.4)
    options += [f"seeds={rng.choice([-1, 2**62, -(2**63), 5])}"] * (rng.random() < 0.5)
    options += [f"position={rng.choice([1, 2**31 - 9])}"] * (rng.random() < 0.3)
    options += [f"{name}=True" for name in ("adjusted", "strided") if rng.random() < 0.25]
    body = f"""from fuzz.sampling import draws
draws(rows, vocab, {rng.randrange(999)}, {device!r}, OPTIONS)"""
    return Call(body, {"rows": rng.randint(1, 8), "vocab": vocab}, {}, tuple(options))
