"""Cost of each method of context parallelism by the IO model, to choose a method or to plan for a machine.

Times cover only attention, with one rank per GPU. Matrix products are assumed to reach the share ``REACHED``
of a card's peak. A message takes the latency of the link, plus its bytes divided by the bandwidth. Both
directions of a link are used at once. A ring overlaps messages with products; the other methods do not.
Merging and copying partial results are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from flashtile.checks.arguments import as_int_within, check_choice
from flashtile.checks.conversions import check_flag
from flashtile.hardware.calls import ELEMENT_BYTES, visible_pairs
from flashtile.hardware.cards import Card, card_of_device, find_card
from flashtile.parallel.blocks import Mask, Pair, pair_of
from flashtile.parallel.layout import LAYOUTS, Piece, in_sequence, pieces_of, tokens_of
from flashtile.problems.common import UNLIMITED

METHODS = ("auto", "ring", "ulysses", "allgather")

REACHED = {"forward": 0.65, "backward": 0.5}
"""Share of the peak of 16-bit products that flashtile's kernels reach on one H100 at long sequences."""


@dataclass(frozen=True)
class Link:
    """The link between a GPU and the other GPUs.

    Args:
        name: name of the link.
        gbps: bandwidth in 10^9 bytes per second, in both directions at once.
        latency_us: latency of an exchange in microseconds, the host's work included.
        source: origin of the numbers.

    Examples:
        >>> from flashtile.parallel import LINKS, Link
        >>> slow = Link("ethernet", 12.5, 60.0, "100 Gbit/s")
        >>> slow.seconds(2**30) / LINKS["nvlink"].seconds(2**30) > 20
        True
    """

    name: str
    gbps: float
    latency_us: float
    source: str

    def seconds(self, num_bytes: float) -> float:
        return self.latency_us * 1e-6 + num_bytes / (self.gbps * 1e9) if num_bytes else 0.0


LINKS = {
    "nvlink": Link(
        "nvlink", 331.0, 56.0, "two H200s (NV18), isend with irecv, fitted to 107 us for 16 MB, 462 for 128"
    ),
    "infiniband": Link(
        "infiniband", 50.0, 60.0, "NDR, 400 Gbit/s a GPU (maker's figure); the latency is assumed"
    ),
}


@dataclass(frozen=True)
class Sharing:
    """Description of attention over a sequence that ranks share, for cost estimates.

    Args:
        batch, seqlen, heads_q, heads_kv, head_dim, head_dim_v, dtype: sizes of the whole call, all ranks
            together.
        left, right: sizes of the window; -1 is unlimited, and causal is ``right = 0``.
        layout: "zigzag", "contiguous" or "striped".
        backward: whether there is a backward pass.

    Examples:
        >>> from flashtile.parallel import Sharing
        >>> causal = Sharing(1, 131072, 32, 8, 128, 128, right=0)
        >>> causal.key_bytes, causal.key_gradient_bytes  # of one position: bfloat16; gradients are float32
        (4096, 8192)
    """

    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    left: int = UNLIMITED
    right: int = UNLIMITED
    layout: str = "zigzag"
    backward: bool = True

    def __post_init__(self) -> None:
        least = {"batch": 0, "seqlen": 0, "left": UNLIMITED, "right": UNLIMITED}
        for name in ("batch", "seqlen", "heads_q", "heads_kv", "head_dim", "head_dim_v", "left", "right"):
            as_int_within(name, getattr(self, name), least.get(name, 1), sys.maxsize)
        if self.heads_q % self.heads_kv:
            text = f"heads_q must be a multiple of heads_kv = {self.heads_kv}, got {self.heads_q}"
            raise ValueError(text)
        check_choice("dtype", self.dtype, tuple(ELEMENT_BYTES))
        check_choice("layout", self.layout, LAYOUTS)
        check_flag("backward", self.backward)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values at one position, of all heads and of all sequences in the batch."""
        return self.batch * self.heads_kv * (self.head_dim + self.head_dim_v) * ELEMENT_BYTES[self.dtype]

    @property
    def key_gradient_bytes(self) -> int:
        """Bytes of dK and dV at one position in all sequences. Ranks send them in float32 (float64 for
        float64)."""
        return self.key_bytes * max(4, ELEMENT_BYTES[self.dtype]) // ELEMENT_BYTES[self.dtype]

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    def flops(self, which: str, pairs: float) -> float:
        """Return the FLOPs of a pass over all heads and sequences.

        Args:
            which: "forward", which has two matrix products, or "backward", which has five.
            pairs: number of visible scores of one head.
        """
        both = self.head_dim + self.head_dim_v
        per_pair = 2 * both if which == "forward" else 2 * (2 * both + self.head_dim)
        return pairs * self.batch * self.heads_q * per_pair


@dataclass(frozen=True)
class ParallelEstimate:
    """Cost of one method for the rank that takes the longest.

    Args:
        method: name of the method.
        ranks: number of ranks.
        seconds: time of all passes.
        compute_seconds: time of the matrix products.
        exposed_seconds: time of messages that does not overlap with computation.
        bytes: bytes that the rank receives.
        extra_bytes: peak memory in addition to the rank's own tensors, in bytes.
    """

    method: str
    ranks: int
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes: float
    extra_bytes: float

    @property
    def efficiency(self) -> float:
        """Share of the time spent in matrix products, from 0 to 1."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0


MAX_RANKS = 2**14
"""Largest number of ranks. It is limited because the time of an estimate grows with the steps of a ring."""


def estimates(sharing: Sharing, ranks: int, card: Card, link: Link) -> list[ParallelEstimate]:
    """Estimate the cost of every method. Return the estimates, the fastest first.

    Args:
        sharing: sizes and mask of the attention call, for all ranks together.
        ranks: number of ranks, from 1 to 16384.
        card: the GPU of each rank.
        link: the link between GPUs.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the card has no peak for the dtype, or ``ranks`` is not from 1 to 16384.

    Examples:
        >>> from flashtile.io_model import find_card
        >>> from flashtile.parallel import LINKS, Sharing, estimates
        >>> causal = Sharing(1, 131072, 32, 8, 128, 128, right=0)
        >>> for row in estimates(causal, 8, find_card("h200"), LINKS["nvlink"]):
        ...     print(f"{row.method}: {row.seconds * 1e3:.1f} ms, {row.efficiency:.0%} in products")
        ring: 116.3 ms, 100% in products
        ulysses: 118.3 ms, 98% in products
        allgather: 122.1 ms, 95% in products
    """
    for name, value, kind in (("sharing", sharing, Sharing), ("card", card, Card), ("link", link, Link)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    ranks = as_int_within("ranks", ranks, 1, MAX_RANKS)
    card.peak_tflops(sharing.dtype)  # raises if the dtype has no peak
    rows = (method(sharing, ranks, card, link) for method in (_ring, _ulysses, _allgather))
    return sorted(rows, key=lambda row: row.seconds)


def two_dimensions(
    sharing: Sharing, ring: int, ulysses: int, card: Card, link: Link, inner_link: Link
) -> ParallelEstimate:
    """Estimate Ulysses over ``inner_link`` within groups, with a ring of the groups over ``link``.

    Args:
        sharing, card: as for :func:`estimates`.
        ring: number of groups.
        ulysses: number of ranks in each group.
        link: the link between groups.
        inner_link: the link within a group.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is less than 1 or more than 16384.

    Examples:
        >>> from flashtile.io_model import find_card
        >>> from flashtile.parallel import LINKS, Sharing, two_dimensions
        >>> causal = Sharing(1, 1048576, 32, 8, 128, 128, right=0)
        >>> row = two_dimensions(causal, 128, 8, find_card("h200"), LINKS["infiniband"], LINKS["nvlink"])
        >>> f"{row.ranks} ranks, {row.seconds * 1e3:.0f} ms, {row.efficiency:.0%} in products"
        '1024 ranks, 63 ms, 92% in products'
    """
    ring, ulysses = as_int_within("ring", ring, 1, MAX_RANKS), as_int_within("ulysses", ulysses, 1, MAX_RANKS)
    of_group = replace(
        sharing,
        heads_q=-(-sharing.heads_q // ulysses),
        heads_kv=max(1, -(-sharing.heads_kv // ulysses)),
    )
    outer = _ring(of_group, ring, card, link)
    inner = _ulysses(replace(sharing, seqlen=-(-sharing.seqlen // ring)), ulysses, card, inner_link)
    return ParallelEstimate(
        "ulysses in a ring",
        ring * ulysses,
        outer.seconds + inner.exposed_seconds,
        outer.compute_seconds,
        outer.exposed_seconds + inner.exposed_seconds,
        outer.bytes + inner.bytes,
        outer.extra_bytes + inner.extra_bytes,
    )


@lru_cache(maxsize=256)
def choose(sharing: Sharing, ranks: int, card: Card, link: Link) -> ParallelEstimate:
    """Return the estimate of the fastest method. On a tie, the method that is first in ``METHODS`` wins."""
    return min(
        estimates(sharing, ranks, card, link), key=lambda row: (row.seconds, METHODS.index(row.method))
    )


@dataclass(frozen=True)
class ParallelExplanation:
    """The method that ``method="auto"`` chooses, with the costs of all methods, the fastest first.

    ``str()`` returns a text for people.
    """

    sharing: Sharing
    card: Card
    link: Link
    rows: tuple[ParallelEstimate, ...]

    @property
    def method(self) -> str:
        return self.rows[0].method

    def __str__(self) -> str:
        where = f"over {self.rows[0].ranks} ranks on {self.card.name}, {self.link.name}"
        lines = [f"method: {self.method}, {where}"]
        for row in self.rows:
            lines.append(
                f"{row.method}: {row.seconds * 1e3:.3g} ms, products {row.compute_seconds * 1e3:.3g} ms, "
                f"waiting {row.exposed_seconds * 1e3:.3g} ms; receives {row.bytes / 2**20:.4g} MiB, "
                f"holds {row.extra_bytes / 2**20:.4g} MiB more"
            )
        return "\n".join(lines)


def explain(
    sharing: Sharing, ranks: int, *, card: Card | None = None, link: Link | None = None
) -> ParallelExplanation:
    """Explain which method ``method="auto"`` chooses, by the estimated costs.

    Args:
        sharing, ranks: as for :func:`estimates`.
        card: one of :data:`flashtile.io_model.CARDS`. None: the card of this machine, or an H200 if
            the machine has no GPU or an unknown one.
        link: one of :data:`flashtile.parallel.LINKS`. None: NVLink if this machine has a GPU for each rank or
            no GPU at all, otherwise InfiniBand.

    Examples:
        >>> from flashtile.parallel import LINKS, Sharing, explain
        >>> windowed = Sharing(1, 131072, 32, 8, 128, 128, left=4096, right=0)
        >>> explain(windowed, 8, link=LINKS["infiniband"]).method
        'ring'
    """
    ranks = as_int_within("ranks", ranks, 1, MAX_RANKS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own_card, own_link = setting_of(device, ranks)
    card, link = own_card if card is None else card, own_link if link is None else link
    return ParallelExplanation(sharing, card, link, tuple(estimates(sharing, ranks, card, link)))


@lru_cache(maxsize=64)
def setting_of(device: torch.device, ranks: int) -> tuple[Card, Link]:
    """Return the default card and link of :func:`explain` for tensors on ``device``."""
    if device.type != "cuda":
        return find_card("h200"), LINKS["nvlink"]
    card = card_of_device(torch.cuda.get_device_name(device)) or find_card("h200")
    return card, LINKS["nvlink" if ranks <= torch.cuda.device_count() else "infiniband"]


def _seconds(sharing: Sharing, card: Card, which: str, pairs: float) -> float:
    return sharing.flops(which, pairs) / (card.peak_tflops(sharing.dtype) * 1e12 * REACHED[which])


def _ranks_to_look_at(ranks: int) -> Iterable[int]:
    """Return the ranks whose costs are computed. The largest cost is at the first, middle or last rank."""
    return sorted({0, ranks // 2, ranks - 1})


def _pieces(sharing: Sharing, ranks: int, rank: int) -> tuple[Piece, ...]:
    return pieces_of(sharing.layout, sharing.seqlen, ranks, rank)


def _pair(sharing: Sharing, queries: tuple[Piece, ...], keys: tuple[Piece, ...]) -> Pair:
    ends = (0, sharing.seqlen)
    return pair_of.__wrapped__(queries, keys, Mask(sharing.left, sharing.right, ends, ends))


def _ring(sharing: Sharing, ranks: int, card: Card, link: Link) -> ParallelEstimate:
    worst = None
    for rank in _ranks_to_look_at(ranks):
        own = _pieces(sharing, ranks, rank)
        steps = [_pair(sharing, own, _pieces(sharing, ranks, (rank - t) % ranks)) for t in range(ranks)]
        computed = waited = received = 0.0
        for which in sharing.passes:
            work = [_seconds(sharing, card, which, pair.pairs) for pair in steps]
            sizes = [pair.tokens * sharing.key_bytes for pair in steps[1:]]
            # Gradients of keys are sent back one step later. About as many tokens are sent back as were
            # received, because all ranks have about the same number of tokens.
            back = [0] + [pair.tokens * sharing.key_gradient_bytes for pair in steps[1:]]
            for t in range(ranks):
                arriving = sizes[t] if t < ranks - 1 else 0
                returning = back[t] if which == "backward" else 0
                waited += max(0.0, link.seconds(arriving + returning) - work[t])
                received += arriving + returning
            computed += sum(work)
        held = 2 * max([pair.tokens for pair in steps[1:]], default=0)
        extra = held * (sharing.key_bytes + (sharing.key_gradient_bytes if sharing.backward else 0))
        row = ParallelEstimate("ring", ranks, computed + waited, computed, waited, received, extra)
        worst = row if worst is None or row.seconds > worst.seconds else worst
    assert worst is not None
    return worst


def _ulysses(sharing: Sharing, ranks: int, card: Card, link: Link) -> ParallelEstimate:
    whole = visible_pairs(sharing.seqlen, sharing.seqlen, sharing.left, sharing.right)
    most_heads = -(-sharing.heads_q // ranks)
    pairs = whole * most_heads / sharing.heads_q
    element = ELEMENT_BYTES[sharing.dtype]
    per_token = sharing.batch * most_heads * (sharing.head_dim + sharing.head_dim_v) * element
    group = sharing.heads_q // sharing.heads_kv
    copies = -(-most_heads // group) * ranks / sharing.heads_kv  # ranks per key head, on average
    keys = sharing.key_bytes * max(1.0, copies) / ranks
    others = sharing.seqlen * (ranks - 1) / ranks
    sizes = {"forward": [others * (per_token // 2 + keys), others * per_token // 2]}
    sizes["backward"] = [others * per_token // 2, others * (per_token // 2 + keys)]
    extra = sharing.seqlen * (per_token + keys)
    return _estimate("ulysses", sharing, ranks, card, link, pairs, sizes, extra)


def _allgather(sharing: Sharing, ranks: int, card: Card, link: Link) -> ParallelEstimate:
    pairs = tokens = 0
    keys = in_sequence(piece for rank in range(ranks) for piece in _pieces(sharing, ranks, rank))
    for rank in _ranks_to_look_at(ranks):
        pair = _pair(sharing, _pieces(sharing, ranks, rank), keys)
        pairs, tokens = max(pairs, pair.pairs), max(tokens, pair.tokens)
    others = max(0, tokens - tokens_of(_pieces(sharing, ranks, 0)))
    sizes = {"forward": [others * sharing.key_bytes]}
    sizes["backward"] = [others * sharing.key_bytes, others * sharing.key_gradient_bytes]
    extra = tokens * (sharing.key_bytes + (sharing.key_gradient_bytes if sharing.backward else 0))
    return _estimate("allgather", sharing, ranks, card, link, pairs, sizes, extra)


def _estimate(
    method: str, sharing: Sharing, ranks: int, card: Card, link: Link, pairs: float,
    sizes: Mapping[str, Sequence[float]], extra: float,
) -> ParallelEstimate:  # fmt: skip
    """Return the cost of a method that does not overlap matrix products with messages.

    ``sizes`` maps each pass, "forward" or "backward", to the sizes of its messages in bytes.
    """
    computed = sum(_seconds(sharing, card, which, pairs) for which in sharing.passes)
    messages = [size for which in sharing.passes for size in sizes[which]]
    waited = sum(map(link.seconds, messages))
    return ParallelEstimate(method, ranks, computed + waited, computed, waited, sum(messages), extra)
