"""Samples the next token of each row of logits in one kernel: temperature, min-p, top-k, top-p and the draw.

:mod:`flashtile.engine.sampler` computes the same in torch, with a sort. Here one program reads its row once
without filters, and mostly two or three times with them::

    survey      the largest score of each lane, and the total probability
    estimate    a bound that all kept scores probably reach
    few reach it:     list_from           list them, and read the list instead of the row from here on
                      draw_from           the best two of them, with noise
                      weights_from        is one of the two kept? If not, draw again among better scores

If random scores show that top-k or top-p keeps more than a 20th of the row, it is read only twice, by
:func:`draw_many`. If it finds no winner, the steps above follow.

A token is kept by top-k and top-p if the weight of all better tokens does not suffice: their number is less
than k, or their probability less than p. So equal logits are kept or dropped together, and one sum decides
about a token: no sort and no exact threshold are needed. A winner that is not kept is worse than all kept
tokens, so they take part in the next draw. Of a flat row, 2 of 100 winners are not kept. The second best is
therefore drawn and checked too: with hundreds of rows, some row would mostly have to be read twice more.

The largest scores of 2,048 lanes contain almost all of the few scores that are kept in a peaked
distribution, so the k-th of them is a tight lower bound. A flat distribution is estimated from one random
score of each lane, to four standard deviations. If the bound was too high, a draw is repeated without it.
Sums have a fixed order, and the noise is a hash of the request's seed, the position and the token, so a draw
does not depend on the batch.

On an H200, 256 greedy rows of 128,256 logits in bfloat16 take 48 us, and filters 7 to 40 us more if few
tokens are kept. Under top-p of 0.5 to 0.99 and a top-k of 5,000, flat rows take 51 us more than greedy rows
with :func:`draw_many`, and 68 to 143 with the steps above. All programs run at once, so the slowest of the
256 rows is the time of all: with one of eight seeds a top-k of 5,000 took 144 us, because :func:`draw_many`
found no winner for a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch, Launched
from flashtile.engine import adjust
from flashtile.engine.adjust import Adjusted

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
IN_PROMPT, ALLOWED, END = (
    tl.constexpr(adjust.IN_PROMPT),
    tl.constexpr(adjust.ALLOWED),
    tl.constexpr(adjust.END),
)
LOG2E = tl.constexpr(1.4426950408889634)
COUNT, NOTHING = tl.constexpr(adjust.COUNT), tl.constexpr(adjust.NOTHING)
LOWEST_KEY = tl.constexpr(0x007FFFFF)
HIGHEST_KEY = tl.constexpr(0xFF800000)
"""Keys of -inf and inf (:func:`key_of`)."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32."""
LEAST_TOP_P = tl.constexpr(1e-30)
"""A top-p that float32 rounds to 0 is taken as this. So the largest score, which has no weight above it, is
always kept: otherwise the draw would not end."""
MOST_NOISE, NOISE_SLOPE = tl.constexpr((32.001 + 127) * 0.69314718056), tl.constexpr(0.69314718056 / 8388608)
"""Noise from random bits is at most MOST_NOISE - NOISE_SLOPE * n, where n is the pattern of the float32 of
these bits, read as an integer (:func:`lead_of`)."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
HUGE = tl.constexpr(536870912.0)
"""2^29. Scores that large differ by 0 or by at least 32, and noise lies between -2.9 and 22.9. So only the
largest score of such a row can be drawn, and the row needs no filters, whose exponentials could overflow."""
STAGES = tl.constexpr(6)
"""One tile is computed while five are on their way. Two programs of a multiprocessor thus wait for 40 KiB of
bfloat16, about what an H200's memory delivers to it within a latency. With one tile on its way, and one
token drawn at a time (:class:`Leaders`), filters take 42 to 132 us more than greedy rows instead of 7 to 33.
What each of the two takes alone was not measured."""


@dataclass(frozen=True)
class SamplingVariant:
    """Constants of the kernel."""

    FILTERED: bool
    """False if no row has min-p, top-k or top-p."""
    BLOCK: int
    """Number of lanes: a tile holds one score of each."""
    LISTED: int
    """Number of scores that the list of a row has memory for, 0 if not FILTERED."""
    ADJUSTED: bool
    """Whether some rows have changed logits. The kernel is then also FILTERED."""

    @property
    def room(self) -> int:
        """Number of scores in memory for each row: the list, and unchanged logits."""
        return self.LISTED + adjust.MAX_ADJUSTED * self.ADJUSTED


class Row(NamedTuple):
    """A row of logits. Scores are logits times ``scale``.

    Attributes:
        logits, vocab_size: the logits.
        scale: the inverse of the temperature, 1 for a greedy row.
        largest: the largest score, once it is known.
        greedy: whether the draw has no noise.
        key: the draw's noise is a hash of this uint64 and the token.
    """

    logits: tl.tensor
    vocab_size: tl.tensor
    scale: tl.tensor
    largest: tl.tensor
    greedy: tl.tensor
    key: tl.tensor


class Changes(NamedTuple):
    """The tensors of :class:`flashtile.engine.adjust.Adjusted`, and their sizes.

    Attributes:
        room: number of entries in a row of ``table``.
        columns: number of columns of ``known``.
        width: largest number of unread tokens.
    """

    lists: tl.tensor
    numbers: tl.tensor
    penalties: tl.tensor
    table: tl.tensor
    known: tl.tensor
    room: tl.tensor
    columns: tl.tensor
    width: tl.tensor


class Listed(NamedTuple):
    """A row's list: scores in memory, float32, and their tokens, int32, which only a draw reads."""

    scores: tl.tensor
    tokens: tl.tensor
    count: tl.tensor


class Best(NamedTuple):
    """A winner so far: its score with noise, its score, and its token."""

    noisy: tl.tensor
    score: tl.tensor
    token: tl.tensor


class Leaders(NamedTuple):
    """The best so far, and the second best, which wins if the best is not kept."""

    first: Best
    second: Best


@triton.jit
def load_scores(row, first, C: tl.constexpr):
    """Return scores [BLOCK] float32. ``first``: a column, or an offset for each lane."""
    column = first + tl.arange(0, C.BLOCK)
    logits = tl.load(row.logits + column, mask=column < row.vocab_size, other=-float("inf"))
    return logits.to(tl.float32) * row.scale


@triton.jit
def load_listed(listed, first, C: tl.constexpr):
    """Return scores [BLOCK] of a list."""
    at = first + tl.arange(0, C.BLOCK)
    return tl.load(listed.scores + at, mask=at < listed.count, other=-float("inf"))


@triton.jit
def key_of(scores):
    """Return integers that sort like the scores, uint32."""
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def score_of(key):
    """Return the score of a key, from -inf to inf."""
    key = tl.minimum(tl.maximum(key, LOWEST_KEY), HIGHEST_KEY)
    return tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(scores, lowest, largest, by_mass):
    """Return the weight of each score: 1, or unnormalised probability; 0 below ``lowest``, and of -inf."""
    weights = tl.where(by_mass, tl.exp(scores - largest), 1.0)
    return tl.where((scores >= lowest) & (scores > -float("inf")), weights, 0.0)


@triton.jit
def add_above(sums, scores, lowest, threshold, unit, largest, by_mass):
    """Add the weights of scores whose keys are at least one, two and three units above a threshold."""
    weights, keys = weights_of(scores, lowest, largest, by_mass), key_of(scores)
    one = sums[0] + tl.where(keys >= threshold + unit, weights, 0.0)
    two = sums[1] + tl.where(keys >= threshold + unit * 2, weights, 0.0)
    three = sums[2] + tl.where(keys >= threshold + unit * 3, weights, 0.0)
    return one, two, three


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def largest_threshold(tile, row, vocab_size, listed, lowest, wanted, by_mass, digits, C: tl.constexpr):
    """Return the largest score for which the scores from it on have a total weight of at least ``wanted``.

    The scores are those of ``tile`` [BLOCK], the first ``vocab_size`` of the row, and those of the list;
    those below ``lowest`` weigh nothing. Returns -inf if their weight does not suffice. The threshold is
    found two bits at a time. With fewer than 16 ``digits``, it is rounded down.
    """
    threshold = tl.full([], 0, tl.uint32)
    for digit in range(digits):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * digit)
        nothing = tl.full([C.BLOCK], 0.0, tl.float32)
        sums = add_above((nothing, nothing, nothing), tile, lowest, threshold, unit, row.largest, by_mass)
        for first in tl.range(0, vocab_size, C.BLOCK, num_stages=STAGES):
            scores = load_scores(row, first, C)
            sums = add_above(sums, scores, lowest, threshold, unit, row.largest, by_mass)
        for first in range(0, listed.count, C.BLOCK):
            scores = load_listed(listed, first, C)
            sums = add_above(sums, scores, lowest, threshold, unit, row.largest, by_mass)
        # Together, because each reduction waits for all threads.
        one, two, three = tl.reduce(sums, 0, add_three)
        steps = (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32)
        threshold += unit * (steps + (three >= wanted).to(tl.uint32))
    return score_of(threshold)


@triton.jit
def random_scores(row, C: tl.constexpr):
    """Return (a random score of each lane [BLOCK], which share of the row's scores these are)."""
    lane = tl.arange(0, C.BLOCK)
    tiles = tl.maximum(tl.cdiv(row.vocab_size, C.BLOCK), 1)
    chosen = (random_bits(lane, tl.full([], 0, tl.uint64)) % tiles.to(tl.uint32)).to(tl.int32) * C.BLOCK
    count = tl.sum((chosen + lane < row.vocab_size).to(tl.int32), 0)
    return load_scores(row, chosen, C), count.to(tl.float32) / row.vocab_size.to(tl.float32)


@triton.jit
def is_allowed(weight, key, largest, allowed, variance, by_mass):
    """Return 1 if ``weight``, of the random scores below a key, is at most ``allowed`` with a margin, else 0.

    The margin is four standard deviations. No weight in the sum is more than that of the key, so its variance
    is at most the product of that and ``allowed``, which itself has a ``variance``.
    """
    margin = 4 * tl.sqrt(allowed * tl.exp(score_of(key) - largest) + variance)
    return (weight + tl.where(by_mass, margin, 0.0) <= allowed).to(tl.uint32)


@triton.jit
def bound_of(random, largest, allowed, variance, by_mass):
    """Return the largest score below which random scores weigh at most ``allowed``, or -inf.

    The weight has the margin of :func:`is_allowed`. The score is rounded down to 16 bits, found two at a
    time.
    """
    threshold, any_score = tl.full([], 0, tl.uint32), tl.full([], -float("inf"), tl.float32)
    weights, keys = weights_of(random, any_score, largest, by_mass), key_of(random)
    for digit in range(8):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * digit)
        one, two, three = threshold + unit, threshold + unit * 2, threshold + unit * 3
        below_one = tl.where(keys < one, weights, 0.0)
        below_two, below_three = tl.where(keys < two, weights, 0.0), tl.where(keys < three, weights, 0.0)
        below_one, below_two, below_three = tl.reduce((below_one, below_two, below_three), 0, add_three)
        steps = is_allowed(below_one, one, largest, allowed, variance, by_mass)
        steps += is_allowed(below_two, two, largest, allowed, variance, by_mass)
        threshold += unit * (steps + is_allowed(below_three, three, largest, allowed, variance, by_mass))
    return score_of(threshold)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_bits(tokens, key):
    x = tokens.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D + (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(bits):
    """Return Gumbel noise for random bits [BLOCK] uint32."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1 - 1.0 / 16777216)
    # The largest noise comes from small u, where log(1 - u) would lose all digits.
    series = u * (1 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))
    return -tl.log(tl.where(u < 0.00390625, series, -tl.log(1 - u)))


@triton.jit
def change_logits(row, tokens, flags, biases, mask, numbers, penalties):
    """Return (logits of tokens, scores after the changes), and overwrite the logits with -inf."""
    logits = tl.load(row.logits + tokens, mask=mask, other=0.0)
    hidden = tl.full(logits.shape, -float("inf"), tl.float32).to(logits.dtype)
    tl.store(row.logits + tokens, hidden, mask=mask)
    logits, counts = logits.to(tl.float32), flags // COUNT
    repetition = tl.load(penalties) + tl.zeros_like(logits)
    repeated = tl.where(logits > 0, tl.math.div_rn(logits, repetition), logits * repetition)
    changed = tl.where(((flags & IN_PROMPT) > 0) | (counts > 0), repeated, logits)
    changed -= tl.load(penalties + 1) * (counts > 0).to(tl.float32)
    changed = changed - tl.load(penalties + 2) * counts.to(tl.float32) + biases
    excluded = (tl.load(numbers + 4) > 0) & ((flags & ALLOWED) == 0)
    excluded |= (tl.load(numbers + 3) > 0) & ((flags & END) > 0)
    scores = tl.where(excluded, -float("inf"), changed * row.scale)
    return logits, tl.where(scores == scores, scores, float("inf"))


@triton.jit
def unread_token(numbers, i, changes):
    """Return the i-th token of the answer that the table lacks, -1 for none."""
    code = tl.load(numbers + 5 + i)
    last = changes.known + tl.load(numbers + 1) * changes.columns
    if code >= 0:
        token = code
    elif code == NOTHING:
        token = tl.full([], -1, tl.int32)
    else:
        token = tl.load(last + (-1 - code))
    return token


@triton.jit
def list_changed(row, numbers, index, changes, scores_at, tokens_at, originals, C: tl.constexpr):
    """List the changed scores of a row with their tokens and logits. Return the length of the list."""
    penalties, count = changes.penalties + index * 3, tl.load(numbers + 2)
    table = changes.table + tl.load(numbers + 1).to(tl.int64) * changes.room * 3
    for first in range(0, count, C.BLOCK):
        place = first + tl.arange(0, C.BLOCK)
        mask = place < count
        tokens = tl.load(table + place * 3, mask=mask, other=-1)
        flags = tl.load(table + place * 3 + 1, mask=mask, other=0)
        biases = tl.load(table + place * 3 + 2, mask=mask, other=0).to(tl.float32, bitcast=True)
        for i in range(changes.width):
            flags += tl.where(tokens == unread_token(numbers, i, changes), COUNT, 0)
        logits, scores = change_logits(row, tokens, flags, biases, mask, numbers, penalties)
        tl.store(scores_at + place, scores, mask=mask)
        tl.store(tokens_at + place, tokens, mask=mask)
        tl.store(originals + place, logits, mask=mask)
    length = count
    for i in range(changes.width):  # tokens that have no entry yet
        token = unread_token(numbers, i, changes)
        times, has_entry = token * 0, (token < 0).to(tl.int32)
        for j in range(changes.width):
            same = (unread_token(numbers, j, changes) == token).to(tl.int32)
            times += same
            has_entry |= tl.where(j < i, same, 0)
        for first in range(0, count, C.BLOCK):
            place = first + tl.arange(0, C.BLOCK)
            tokens = tl.load(table + place * 3, mask=place < count, other=-1)
            has_entry |= tl.max((tokens == token).to(tl.int32), 0)
        if has_entry == 0:
            logits, scores = change_logits(row, token, times * COUNT, 0.0, token >= 0, numbers, penalties)
            tl.store(scores_at + length, scores)
            tl.store(tokens_at + length, token)
            tl.store(originals + length, logits)
            length += 1
    tl.debug_barrier()  # other threads read the list and the logits
    return length


@triton.jit
def no_winner(noisy):
    """Return what any token with a score with noise above ``noisy`` beats."""
    score = tl.full([], -float("inf"), tl.float32)
    return Best(tl.full([], noisy, tl.float32), score, tl.full([], NO_TOKEN, tl.int32))


@triton.jit
def best_of(noisy, scores, tokens):
    """Return the best of a tile."""
    found = tl.max(noisy, 0)
    token = tl.min(tl.where(noisy == found, tokens, NO_TOKEN), 0)
    return Best(found, tl.max(tl.where(tokens == token, scores, -float("inf")), 0), token)


@triton.jit
def better(a, b):
    wins = (a.noisy > b.noisy) | ((a.noisy == b.noisy) & (a.token < b.token))
    return Best(
        tl.where(wins, a.noisy, b.noisy), tl.where(wins, a.score, b.score), tl.where(wins, a.token, b.token)
    )  # fmt: skip


@triton.jit
def draw(leaders, row, scores, tokens, bits, lowest, strict, SECOND: tl.constexpr):
    """Return the leaders among ``leaders`` and the scores from ``lowest`` on with the noise of ``bits``.

    With ``strict``, scores equal to ``lowest`` are left out. Without ``SECOND``, the second is not found.
    """
    noise = tl.where(row.greedy, 0.0, gumbel(bits))
    # inf stands for a logit that is NaN or infinite. It wins, so that the caller can detect it.
    scores = tl.where(scores == scores, scores, float("inf"))
    drawn = (scores > lowest) | ((scores == lowest) & (strict == 0))
    noisy = tl.where(drawn, scores + noise, -float("inf"))
    one, second = best_of(noisy, scores, tokens), leaders.second
    first = better(one, leaders.first)
    if SECOND:
        other = best_of(tl.where(tokens == one.token, -float("inf"), noisy), scores, tokens)
        # The worse of two firsts, or what follows one of them.
        if first.token == one.token:
            second = better(leaders.first, other)
        else:
            second = better(second, one)
    return Leaders(first, second)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def slightly_below(lowest):
    """Return a bound for scores from ``lowest`` on in :func:`lead_of`.

    A score is a product that the compiler does not round in a difference, so that a score equal to ``lowest``
    may seem to be below it, by an error of 2^-24.
    """
    return tl.maximum(lowest - tl.abs(lowest) * (1.0 / 4194304), LOWEST)


@triton.jit
def lead_of(scores, bits, least, slope, below):
    """Return numbers that are negative for scores below ``below``, or that noise cannot raise enough.

    ``least`` is the needed score with noise, less MOST_NOISE, and ``slope`` is NOISE_SLOPE. In greedy rows,
    which have no noise, 0 stands for both constants.
    """
    # Noise is at most -log(u), and the bits of a float, read as an integer, bound its logarithm. Logarithms
    # of all tokens would take more time than reading their logits.
    logs = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    # One minimum instead of two conditions: comparisons and choices take most of the time.
    return tl.minimum(scores - logs * slope - least, scores - below)


@triton.jit
def may_win(leaders, row, scores, bits, lowest, SECOND: tl.constexpr):
    """Return whether a score from ``lowest`` on may be a leader with noise; True if in doubt."""
    noisy = leaders.second.noisy if SECOND else leaders.first.noisy
    most, slope = tl.where(row.greedy, 0.0, MOST_NOISE), tl.where(row.greedy, 0.0, NOISE_SLOPE)
    lead = lead_of(scores, bits, noisy - most, slope, slightly_below(lowest))
    # NaN, as a score, may win, and so may a tie, because lists are in no order.
    return (tl.reduce(lead, 0, larger) < 0) == 0


@triton.jit
def survey(row, listed, by_mass, C: tl.constexpr):
    """Read a row and a list. Return (largest score, of each lane [BLOCK], total weight by mass)."""
    most = tl.full([C.BLOCK], -float("inf"), tl.float32)
    total = tl.full([C.BLOCK], 0.0, tl.float32)
    # Exponentials relative to one score take half the instructions of those relative to each lane's largest.
    # The largest score of the row is mostly between the first tile's and 135 more. If not, sums of
    # exponentials could overflow, and the row is read again.
    base = tl.maximum(tl.max(load_scores(row, 0, C), 0), -1e30) + 60
    largest, reads = tl.full([], -float("inf"), tl.float32), tl.full([], 1, tl.int32)
    exponent = base
    while reads > 0:
        total, exponent = tl.full([C.BLOCK], 0.0, tl.float32), base * LOG2E
        for first in tl.range(0, row.vocab_size, C.BLOCK, num_stages=STAGES):
            scores = load_scores(row, first, C)
            most = larger(most, scores)
            if by_mass:
                total += tl.exp2(tl.fma(scores, LOG2E, -exponent))
        for first in range(0, listed.count, C.BLOCK):
            scores = load_listed(listed, first, C)
            most = larger(most, scores)
            total += tl.exp2(tl.fma(scores, LOG2E, -exponent))
        largest = tl.max(tl.where(most == most, most, float("inf")), 0)
        reads = (by_mass & (largest > base + 75)).to(tl.int32)
        base = tl.where(reads > 0, largest, base)
    return largest, most, tl.sum(total, 0) * tl.exp2(tl.fma(-largest, LOG2E, exponent))


@triton.jit
def weight_of(scores, lowest, row, by_mass):
    """Return the total weight of the scores from ``lowest`` on."""
    return tl.sum(weights_of(scores, lowest, row.largest, by_mass), 0)


@triton.jit
def with_margin(number):
    """Return a number of random scores and four standard deviations and four: (sqrt(n) + 2)^2."""
    return number + 4 * tl.sqrt(number) + 4


@triton.jit
def estimate(row, best, listed, total, top_k, top_p, C: tl.constexpr):
    """Return (a bound that all kept scores probably reach, whether too many scores reach it for a list).

    With both filters, the bound is for top-k. ``best`` and ``total`` are results of :func:`survey`;
    ``listed`` is what the list has already.
    """
    by_mass, any_score = top_k == 0, tl.full([], -float("inf"), tl.float32)
    none, are_many, lower = tl.full([], 0, tl.int32), top_k < 0, any_score
    empty = Listed(listed.scores, listed.tokens, none)
    wanted = tl.where(by_mass, total * top_p * 1.0001, top_k.to(tl.float32))
    if weight_of(best, any_score, row, by_mass) >= wanted:
        lower = largest_threshold(best, row, none, empty, any_score, wanted, by_mass, 8, C)
    # If half of the lanes' largest scores are kept, ln(2) lanes as many scores are expected to be.
    if (lower == any_score) | (weight_of(best, lower, row, False) > C.BLOCK // 2):
        # By mass, the weight below the threshold is estimated among random scores, because a few large
        # weights dominate the sum above it.
        random, share = random_scores(row, C)
        below, number = total * (1 - top_p) * share, weight_of(random, any_score, row, False)
        least = bound_of(
            random, row.largest, tl.where(by_mass, below, number - with_margin(wanted * share)), 0.0, by_mass
        )  # fmt: skip
        lower = tl.maximum(lower, least)
        reached = weight_of(random, lower, row, False)
        are_many = reached + 4 * tl.sqrt(reached) > (C.LISTED - listed.count) * share
    return lower, are_many


@triton.jit
def append(listed, count, begin, marks, C: tl.constexpr):
    """Append the tokens whose bits in ``marks`` are set to a list. Return the new length of the list.

    Bit i of a lane stands for its token in the i-th tile from column ``begin`` on. The scores are not listed:
    to read them here would be a wait for memory in each step.
    """
    # The number of set bits, in fields of 2, 4 and 8 bits, and in all.
    pairs = marks - ((marks >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    length = ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
    at = count + tl.cumsum(length, 0) - length
    for _ in range(tl.max(length, 0)):
        lowest = marks & (0 - marks)
        tile = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tokens = begin + tile * C.BLOCK + tl.arange(0, C.BLOCK)
        tl.store(listed.tokens + at, tokens, mask=(marks > 0) & (at < C.LISTED))
        marks, at = marks ^ lowest, at + 1
    return count + tl.sum(length, 0)


@triton.jit
def load_appended(row, listed, first, end, C: tl.constexpr):
    """Return (scores, tokens) [BLOCK] of a list, whose scores are listed only up to ``listed.count``."""
    at = first + tl.arange(0, C.BLOCK)
    tokens = tl.load(listed.tokens + at, mask=at < end, other=NO_TOKEN)
    known = tl.load(listed.scores + at, mask=at < listed.count, other=-float("inf"))
    logits = tl.load(row.logits + tokens, mask=(at >= listed.count) & (at < end), other=-float("inf"))
    return tl.where(at < listed.count, known, logits.to(tl.float32) * row.scale), tokens


@triton.jit
def list_from(row, listed, lower, C: tl.constexpr):
    """Append the scores from ``lower`` on to a list. Return its length, of which C.LISTED are in memory."""
    count, lower = listed.count, tl.maximum(lower, LOWEST)
    for begin in range(0, row.vocab_size, 32 * C.BLOCK):
        # A bit of each lane for each tile whose score is listed. The places in the list depend on all lanes.
        # To compute them for each tile would take more instructions than all else.
        marks, bit = tl.full([C.BLOCK], 0, tl.uint32), tl.full([], 1, tl.uint32)
        end = tl.minimum(begin + 32 * C.BLOCK, row.vocab_size)
        for first in tl.range(begin, end, C.BLOCK, num_stages=STAGES):
            marks |= tl.where(load_scores(row, first, C) >= lower, bit, 0)
            bit <<= 1
        count = append(listed, count, begin, marks, C)
    tl.debug_barrier()  # other threads read the tokens
    end = tl.minimum(count, C.LISTED)
    for first in range(listed.count, end, C.BLOCK):
        at, (scores, _) = first + tl.arange(0, C.BLOCK), load_appended(row, listed, first, end, C)
        tl.store(listed.scores + at, scores, mask=at < end)
    tl.debug_barrier()  # other threads read the scores
    return count


@triton.jit
def draw_from(row, listed, lower, strict, SECOND: tl.constexpr, C: tl.constexpr):
    """Draw among the scores of a row and a list from ``lower`` on, or with ``strict`` above it."""
    none = no_winner(LOWEST)  # not -inf: tiles without a score from ``lower`` on cannot win
    leaders = Leaders(none, none)
    for first in tl.range(0, row.vocab_size, C.BLOCK, num_stages=STAGES):
        # ^ is + here. The compiler would keep sums in registers from the load on, for each stage.
        scores, lane = load_scores(row, first, C), tl.arange(0, C.BLOCK)
        bits = random_bits(lane, row.key ^ first)  # those of first ^ lane, with one instruction less
        if may_win(leaders, row, scores, bits, lower, SECOND):
            leaders = draw(leaders, row, scores, first ^ lane, bits, lower, strict, SECOND)
    for first in range(0, listed.count, C.BLOCK):
        at = first + tl.arange(0, C.BLOCK)
        tokens = tl.load(listed.tokens + at, mask=at < listed.count, other=NO_TOKEN)
        scores, bits = load_listed(listed, first, C), random_bits(tokens, row.key)
        if may_win(leaders, row, scores, bits, lower, SECOND):
            leaders = draw(leaders, row, scores, tokens, bits, lower, strict, SECOND)
    return leaders


@triton.jit
def weights_from(row, listed, one, two, lower, by_mass, C: tl.constexpr):
    """Return the weights of a row and a list above ``one``, above ``two``, and from ``lower`` on."""
    nothing = tl.full([C.BLOCK], 0.0, tl.float32)
    above_one, above_two, total = nothing, nothing, nothing
    factor, lower = tl.where(by_mass, LOG2E, 0.0), tl.maximum(lower, LOWEST)  # -inf has no weight
    exponent = row.largest * factor
    for first in tl.range(0, row.vocab_size, C.BLOCK, num_stages=STAGES):
        scores = load_scores(row, first, C)
        weights = tl.exp2(tl.fma(scores, factor, -exponent))
        above_one += tl.where(scores > one, weights, 0.0)
        above_two += tl.where(scores > two, weights, 0.0)
        total += tl.where(scores >= lower, weights, 0.0)
    # The exponent was rounded, by 0.06 with a score of 1e6.
    unit = tl.exp2(tl.fma(-row.largest, factor, exponent))
    above_one, above_two, total = above_one * unit, above_two * unit, total * unit
    for first in range(0, listed.count, C.BLOCK):
        scores = load_listed(listed, first, C)
        weights = weights_of(scores, lower, row.largest, by_mass)
        above_one += tl.where(scores > one, weights, 0.0)
        above_two += tl.where(scores > two, weights, 0.0)
        total += weights
    return tl.reduce((above_one, above_two, total), 0, add_three)


@triton.jit
def draw_kept(row, listed, lower, least, wanted, by_mass, C: tl.constexpr):
    """Draw among the scores of a row and a list that have less than ``wanted`` weight above them.

    All of these scores are at least ``least``, and probably at least ``lower``.
    """
    winner = no_winner(-float("inf"))
    no, yes = lower != lower, tl.full([], 1, tl.int1)  # False and True
    strict, is_kept, is_checked = no, no, lower <= least
    while is_kept == 0:
        first, second = draw_from(row, listed, lower, strict, True, C)
        above, above_second, total = weights_from(row, listed, first.score, second.score, lower, by_mass, C)
        if is_checked | (total >= wanted):
            winner, is_kept, is_checked = first, yes, yes
            if above >= wanted:
                winner, is_kept = second, above_second < wanted
            # What is not kept is a bound for what is, so most of the mass is left out at each time.
            lower, strict = tl.maximum(first.score, second.score), is_kept == 0
        else:
            lower, is_checked = least, yes
    return winner


@triton.jit
def list_candidates(row, listed, lower, bound, base, C: tl.constexpr):
    """Append the scores from ``lower`` on that noise may raise to ``bound``, as :func:`may_win` tells.

    Return the length of the list, of which C.LISTED are in memory, and the row's and the list's total
    probability relative to ``base``. Lanes wait for each other only after 32 tiles.
    """
    lane, count, total = tl.arange(0, C.BLOCK), listed.count, tl.full([C.BLOCK], 0.0, tl.float32)
    below, exponent, least = slightly_below(lower), base * LOG2E, bound - MOST_NOISE
    for first in range(0, listed.count, C.BLOCK):
        total += tl.exp2(tl.fma(load_listed(listed, first, C), LOG2E, -exponent))
    for begin in range(0, row.vocab_size, 32 * C.BLOCK):
        marks, bit = tl.full([C.BLOCK], 0, tl.uint32), tl.full([], 1, tl.uint32)
        end = tl.minimum(begin + 32 * C.BLOCK, row.vocab_size)
        for first in tl.range(begin, end, C.BLOCK, num_stages=STAGES):
            scores = load_scores(row, first, C)
            total += tl.exp2(tl.fma(scores, LOG2E, -exponent))
            lead = lead_of(scores, random_bits(lane, row.key ^ first), least, NOISE_SLOPE, below)
            marks |= tl.where(lead >= 0, bit, 0)
            bit <<= 1
        count = append(listed, count, begin, marks, C)
    tl.debug_barrier()  # other threads read the list
    return count, tl.sum(total, 0)


@triton.jit
def best_of_two(noisy_a, score_a, token_a, noisy_b, score_b, token_b):
    best = better(Best(noisy_a, score_a, token_a), Best(noisy_b, score_b, token_b))
    return best.noisy, best.score, best.token


@triton.jit
def best_above(noisy, scores, tokens, score):
    """Return the best of a tile among the scores above ``score``. If there is none, its score is -inf."""
    noisy = tl.where(scores > score, noisy, -float("inf"))
    found, best, token = tl.reduce((noisy, scores, tokens), 0, best_of_two)
    return Best(found, tl.where(found > -float("inf"), best, -float("inf")), token)


@triton.jit
def add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def add_weights(sums, scores, bounds, factor, exponent):
    """Add the weights of scores above four bounds, and from a fifth on."""
    weights = tl.exp2(tl.fma(scores, factor, -exponent))
    return (
        sums[0] + tl.where(scores > bounds[0], weights, 0.0),
        sums[1] + tl.where(scores > bounds[1], weights, 0.0),
        sums[2] + tl.where(scores > bounds[2], weights, 0.0),
        sums[3] + tl.where(scores > bounds[3], weights, 0.0),
        sums[4] + tl.where(scores >= bounds[4], weights, 0.0),
    )


@triton.jit
def draw_many(row, adjusted, top_k, top_p, C: tl.constexpr):
    """Draw in two passes if top-k or top-p keeps many tokens. Return (winner, whether it was found).

    Random scores tell roughly which tokens are kept, and their total probability Z. Noise raises some
    exp(4) = 55 of them above log Z - 4, which the first pass lists. The second sums the weights above four of
    them: the best, and after each one the best of those with a larger score. The first of the four that is
    kept is drawn, since those with a smaller score than one that is not kept are not kept either.
    """
    by_mass, any_score = top_k == 0, tl.full([], -float("inf"), tl.float32)
    winner, is_found = no_winner(-float("inf")), top_k < 0
    random, share = random_scores(row, C)
    base = tl.max(random, 0)
    row = Row(row.logits, row.vocab_size, row.scale, base, row.greedy, row.key)
    # A large weight by chance would make the estimate of the total too high, which costs a second draw. If
    # they are cut, the total may be too low, which costs only some candidates more.
    uncut = weight_of(random, any_score, row, True)
    weights = tl.minimum(weights_of(random, any_score, base, True), uncut * (1.0 / 64))
    total, squares, number = tl.reduce(
        (weights, weights * weights, tl.where(random > -float("inf"), 1.0, 0.0)), 0, add_three
    )
    # Of a peaked row, most of the total was cut. It tells little, and mostly few tokens are kept. With more
    # than 0.6 of it left, 4 standard deviations are less than ``below`` itself: 4 / sqrt(0.6 * 64) = 0.65.
    # Larger scores are rounded so much that a candidate could be missed.
    if (total > 0.6 * uncut) & (tl.abs(base) < 1024) & (row.greedy == 0):
        below = tl.where(by_mass, total * (1 - top_p), number - with_margin(top_k.to(tl.float32) * share))
        lower = bound_of(random, base, below, (1 - top_p) * (1 - top_p) * squares, by_mass)
        # A list of a 20th of the row takes as long.
        if weight_of(random, lower, row, False) > C.BLOCK // 20:
            bound = base + tl.log(weight_of(random, lower, row, True) / share) - 4
            count, every = list_candidates(row, adjusted, lower, bound, base, C)
            # Also False for NaN, and if a score is infinite or far above the random ones.
            if (count <= C.BLOCK) & (count <= C.LISTED) & (every < 1e30):
                scores, tokens = load_appended(row, adjusted, 0, count, C)
                noisy = scores + gumbel(random_bits(tokens, row.key))
                noisy = tl.where((scores >= lower) & (noisy >= bound), noisy, -float("inf"))
                a = best_above(noisy, scores, tokens, any_score)
                b = best_above(noisy, scores, tokens, a.score)
                c = best_above(noisy, scores, tokens, b.score)
                d = best_above(noisy, scores, tokens, c.score)
                nothing, factor = tl.full([C.BLOCK], 0.0, tl.float32), tl.where(by_mass, LOG2E, 0.0)
                sums = nothing, nothing, nothing, nothing, nothing
                bounds = a.score, b.score, c.score, d.score, tl.maximum(lower, LOWEST)
                for first in tl.range(0, row.vocab_size, C.BLOCK, num_stages=STAGES):
                    sums = add_weights(sums, load_scores(row, first, C), bounds, factor, base * factor)
                for first in range(0, adjusted.count, C.BLOCK):
                    sums = add_weights(sums, load_listed(adjusted, first, C), bounds, factor, base * factor)
                above, above_b, above_c, above_d, reached = tl.reduce(sums, 0, add_five)
                wanted = tl.where(by_mass, every * top_p, top_k.to(tl.float32))
                winner = a
                if (above < wanted) == 0:
                    winner, above = b, above_b
                if (above < wanted) == 0:
                    winner, above = c, above_c
                if (above < wanted) == 0:
                    winner, above = d, above_d
                is_found = (above < wanted) & (reached >= wanted) & (winner.score > -float("inf"))
    return winner, is_found


@triton.jit
def sample_in_steps(row, adjusted, top_k, top_p, min_p, C: tl.constexpr):
    """Return the winner among the scores that the filters keep."""
    by_mass, any_score = top_k == 0, tl.full([], -float("inf"), tl.float32)
    filters, both = (top_k > 0) | (top_p < 1), (top_k > 0) & (top_p < 1)
    largest, total, least = any_score, any_score, any_score
    nothing = tl.full([C.BLOCK], -float("inf"), tl.float32)
    best = nothing
    if filters | (min_p > 0):
        largest, best, total = survey(row, adjusted, top_p < 1, C)
        filters &= tl.abs(largest) < HUGE
        least = tl.where(largest < float("inf"), largest + tl.log(min_p), any_score)
    row = Row(row.logits, row.vocab_size, row.scale, largest, row.greedy, row.key)
    if filters:
        if by_mass & (min_p > 0):
            _, _, total = weights_from(row, adjusted, least, least, least, True, C)
        lower, are_many = estimate(row, best, adjusted, total, top_k, top_p, C)
        lower, wanted = tl.maximum(lower, least), tl.where(by_mass, total * top_p, top_k.to(tl.float32))
        listed = adjusted
        if are_many == 0:
            count = list_from(row, adjusted, lower, C)
            listed = Listed(adjusted.scores, adjusted.tokens, tl.minimum(count, C.LISTED))
            weights = tl.full([C.BLOCK], 0.0, tl.float32)
            for first in range(0, listed.count, C.BLOCK):
                weights += weights_of(load_listed(listed, first, C), lower, row.largest, by_mass)
            enough = tl.sum(weights, 0) >= wanted
            are_many = (count > C.LISTED) | ((enough | (lower <= least)) == 0)
            lower = tl.where(are_many, least, lower)
        # Either the list is all that is drawn from, or the row is, with what the list had before.
        left = tl.where(are_many, row.vocab_size, 0)
        row = Row(row.logits, left, row.scale, largest, row.greedy, row.key)
        listed = Listed(adjusted.scores, adjusted.tokens, tl.where(are_many, adjusted.count, listed.count))
        least = tl.where(are_many, least, lower)
        if both:  # top-p is a share of what top-k keeps
            kth = largest_threshold(nothing, row, left, listed, least, wanted, False, 16, C)
            least = tl.maximum(least, kth)
            lower = least
            _, _, total = weights_from(row, listed, lower, lower, lower, True, C)
            wanted, by_mass = total * top_p, top_p < 1
        winner = draw_kept(row, listed, lower, least, wanted, by_mass, C)
    else:
        winner, _ = draw_from(row, adjusted, least, False, False, C)
    return winner


_PARAMETERS = (
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr", "lists_ptr",
    "numbers_ptr", "penalties_ptr", "table_ptr", "known_ptr",
)  # fmt: skip


# A program loads one number of each parameter, so the alignment of parameters does not matter. The alignment
# of rows does: with it, 16 bytes are loaded at a time.
@kernel(do_not_specialize=("room", "columns", "width"), do_not_specialize_on_alignment=_PARAMETERS)
def sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, scores_ptr,
    tokens_ptr, out_ptr, best_ptr, lists_ptr, numbers_ptr, penalties_ptr, table_ptr, known_ptr, logits_stride,
    vocab_size, room, columns, width, C: tl.constexpr,
):  # fmt: skip
    """Sample a token for each row of logits (rows, vocab_size). Grid: (rows,).

    ``scores_ptr`` (rows, room) float32 and ``tokens_ptr`` (rows, LISTED) int32 are overwritten. The
    arguments from ``lists_ptr`` to ``known_ptr`` and from ``room`` to ``width`` are :class:`Changes`;
    changed logits are -inf while the kernel runs. The other tensors have shape (rows,). The results are the
    tokens, int64, and their scores.
    """
    at = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + at)
    greedy, any_score = temperature == 0, tl.full([], -float("inf"), tl.float32)
    seed = tl.load(seed_ptr + at).to(tl.uint64)
    position = tl.load(position_ptr + at).to(tl.uint64)
    scale = tl.math.div_rn(1.0, tl.where(greedy, 1.0, temperature))
    key = mix64(seed + position * GOLDEN)
    row = Row(logits_ptr + at * logits_stride, vocab_size, scale, any_score, greedy, key)
    scores_at, tokens_at = scores_ptr + at * C.room, tokens_ptr + at * C.LISTED
    count = tl.full([], 0, tl.int32)
    if C.ADJUSTED:
        changes = Changes(lists_ptr, numbers_ptr, penalties_ptr, table_ptr, known_ptr, room, columns, width)
        index = tl.load(changes.lists + at)
        originals = scores_at + C.LISTED
        if index >= 0:
            numbers = changes.numbers + index * (5 + changes.width)
            count = list_changed(row, numbers, index, changes, scores_at, tokens_at, originals, C)
            vocab_size_left = tl.where(tl.load(numbers + 4) > 0, 0, vocab_size)
            row = Row(row.logits, vocab_size_left, scale, any_score, greedy, key)
    adjusted = Listed(scores_at, tokens_at, count)
    if C.FILTERED:
        top_k = tl.load(top_k_ptr + at)
        top_k = tl.where(top_k < vocab_size, top_k, 0).to(tl.int32)
        top_p = tl.maximum(tl.load(top_p_ptr + at), LEAST_TOP_P)
        min_p = tl.load(min_p_ptr + at)
        winner, is_found = no_winner(-float("inf")), top_k < 0
        # A top-k of fewer tokens is faster with a list of them.
        may_keep_many = tl.where(top_p < 1, top_k == 0, top_k > row.vocab_size // 32)
        if may_keep_many & (min_p == 0) & (adjusted.count <= C.BLOCK // 2):
            winner, is_found = draw_many(row, adjusted, top_k, top_p, C)
        if is_found == 0:
            winner = sample_in_steps(row, adjusted, top_k, top_p, min_p, C)
    else:
        winner, _ = draw_from(row, adjusted, any_score, False, False, C)
    tl.store(out_ptr + at, tl.minimum(winner.token, vocab_size - 1).to(tl.int64))
    tl.store(best_ptr + at, winner.score)
    if C.ADJUSTED:
        tl.debug_barrier()  # all threads have read the logits
        for first in range(0, count, C.BLOCK):
            place = first + tl.arange(0, C.BLOCK)
            tokens = tl.load(tokens_at + place, mask=place < count, other=0)
            logits = tl.load(originals + place, mask=place < count, other=0.0)
            tl.store(row.logits + tokens, logits.to(row.logits.dtype.element_ty), mask=place < count)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
    positions: Tensor, filtered: bool, adjusted: Adjusted | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sample a token for each row of logits (rows, vocab_size), which may have any strides.

    Args:
        temperature, top_p, min_p: (rows,) float32. top_k, seed: (rows,) int64. positions: (rows,) int32.
        filtered: False if no row has min-p, top-k or top-p.
        adjusted: changes of the logits.

    Returns:
        The tokens (rows,) int64, and their changed logits divided by the temperature, (rows,) float32.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    variant = variant_of(filtered, logits.shape[1], adjusted is not None)
    parameters = temperature, top_k, top_p, min_p, seed, positions
    tensors, numbers = _arguments(logits, parameters, variant, adjusted)
    sample_kernel[(len(logits),)](*tensors, *numbers, C=variant, **options())
    return tensors[9], tensors[10]  # out_ptr and best_ptr


def sampling_ahead(dtype: torch.dtype, vocab_size: int, adjusts: bool = True) -> list[Launched]:
    """Return the launches of all kernels of :func:`sample` for this dtype, to be compiled ahead of time.

    ``adjusts`` says whether such logits may have changes.
    """
    logits = torch.empty(1, vocab_size, dtype=dtype, device="meta")
    floats = torch.empty(1, device="meta")
    parameters = floats, floats.long(), floats, floats, floats.long(), floats.int()
    launches = []
    for filtered, adjusted in ((False, False), (True, False), *[(True, True)] * adjusts):
        variant = variant_of(filtered, vocab_size, adjusted)
        tensors, numbers = _arguments(logits, parameters, variant, None)
        launches.append((CachedLaunch(sample_kernel, 1, numbers, (variant,), None, **options()), tensors))
    return launches


def _arguments(
    logits: Tensor, parameters: tuple[Tensor, ...], variant: SamplingVariant, adjusted: Adjusted | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Allocate lists and results, and return the kernel's tensors and its numbers."""
    (rows, vocab_size), device = logits.shape, logits.device
    scores = torch.empty(rows, variant.room, device=device)
    tokens = torch.empty(rows, variant.LISTED, dtype=torch.int32, device=device)
    results = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device)
    # Without changes, their tensors are not read.
    changes: tuple[Tensor, ...] = tokens, tokens, scores, tokens, tokens
    sizes = 2, 2, 2
    if adjusted is not None:
        changes = adjusted[:-1]
        sizes = adjusted.table.shape[1], adjusted.known.shape[1], adjusted.numbers.shape[1] - 5
    tensors = logits, *parameters, scores, tokens, *results, *changes
    return tensors, (logits.stride(0), vocab_size, *sizes)


def variant_of(filtered: bool, vocab_size: int, adjusted: bool) -> SamplingVariant:
    """Return the constants of the kernel for a batch."""
    power, filtered = triton.next_power_of_2(vocab_size), filtered or adjusted
    listed = max(2 * adjust.MAX_ADJUSTED, power // 8) if filtered else 0
    return SamplingVariant(filtered, min(2048, power), listed, adjusted)


def options() -> dict[str, Any]:
    """Return the options of a launch.

    Two programs share a multiprocessor: one works while the other waits for the last of its threads. For that
    a thread may have 128 registers. AMD's compiler has no such option.
    """
    return {"num_warps": 8} if torch.version.hip else {"num_warps": 8, "maxnreg": 128}
