"""Description of an attention call for the IO model: shapes, element size and mask, with counts in closed
form."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields

from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import RANGES, Masking, positions, split

ELEMENT_BYTES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


NOT_OF_PROBLEMS = ("dtype", "lengths", "page_size", "cache_dtype")
"""Fields of :class:`Call` that a ``Problem`` of attention lacks or has in another form."""


@dataclass(frozen=True)
class Call(Masking):
    """Description of an attention call on ``batch`` sequences of one length, or of different ``lengths``.

    Options of the mask (:class:`~flashtile.problems.masking.Masking`), and what comes after dtype, are passed
    by name.

    Args:
        batch: number of sequences.
        seqlen_q, seqlen_k: number of tokens of each sequence; with ``lengths``, of the longest sequence.
        num_heads_q, num_heads_kv: numbers of heads; num_heads_q must be a multiple of num_heads_kv.
        head_dim, head_dim_v: head size of q and k, and of v and out. head_dim_v defaults to head_dim.
        dtype: name of a torch dtype.
        window_left, window_right: keys that a row sees before and after its own position, aligned to the
            bottom right; -1 is unlimited. Causal is ``window_right = 0``.
        attention_chunk: size of the chunks of positions to which rows are limited; 0 is off.
        lengths: (seqlen_q, seqlen_k) of each sequence. None: all sequences have seqlen_q and seqlen_k.
        page_size: tokens per page of the key/value cache, 0 for a dense cache; None if there is no cache.
        cache_dtype: name of the cache's dtype; defaults to ``dtype``.

    Raises:
        ValueError: a number, dtype or page size is not valid.

    Examples:
        >>> from flashtile.io_model import Call
        >>> causal = Call(4, 4096, 4096, 32, 8, 128, window_right=0)  # 32 query heads over 8 key/value heads
        >>> causal.visible_pairs == 4 * 32 * 4096 * 4097 // 2
        True
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    _: KW_ONLY
    lengths: tuple[tuple[int, int], ...] | None = None
    page_size: int | None = None
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        least = {"batch": 0, "seqlen_q": 0, "seqlen_k": 0}
        least |= {name: allowed.least for name, allowed in RANGES.items()}
        for name in ("num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", *least):
            value, smallest = getattr(self, name), least.get(name, 1)
            if value is not None and value < smallest:
                allowed = f"{RANGES[name].meaning} or more" if name in RANGES else f"at least {smallest}"
                raise ValueError(f"{name} must be {allowed}, got {value}")
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q must be a multiple of num_heads_kv = {self.num_heads_kv}, "
                f"got {self.num_heads_q}"
            )
        for name in ("dtype", "cache_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in ELEMENT_BYTES:
                raise ValueError(f"{name} must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
        if self.page_size is not None and self.page_size < 0:
            raise ValueError(f"page_size must be 0 (a dense cache) or more, got {self.page_size}")

    @classmethod
    def from_problem(cls, problem: Problem) -> Call:
        """Make a Call from a Problem.

        Each sequence of a batch of variable lengths is counted as if it had the longest length.
        """
        shared = (field.name for field in fields(cls) if field.name not in NOT_OF_PROBLEMS)
        dtype = str(problem.dtype).removeprefix("torch.")
        return cls(**{name: getattr(problem, name) for name in shared}, dtype=dtype)

    @property
    def masking(self) -> Masking:
        """The mask alone."""
        return Masking(**{name: getattr(self, name) for name in RANGES})

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def cache_element_bytes(self) -> int:
        return ELEMENT_BYTES[self.cache_dtype or self.dtype]

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of each sequence."""
        return ((self.seqlen_q, self.seqlen_k),) * self.batch if self.lengths is None else self.lengths

    @property
    def rows_q(self) -> int:
        """Number of rows of q in all sequences and heads."""
        return sum(seqlen_q for seqlen_q, _ in self.sequences) * self.num_heads_q

    @property
    def rows_k(self) -> int:
        """Number of rows of k in all sequences and key/value heads."""
        return sum(seqlen_k for _, seqlen_k in self.sequences) * self.num_heads_kv

    @property
    def score_pairs(self) -> int:
        """Number of (query, key) pairs of all sequences and query heads, including hidden pairs."""
        return sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in self.sequences) * self.num_heads_q

    @property
    def visible_pairs(self) -> int:
        """Exact number of visible (query, key) pairs of all sequences and query heads.

        The diagonal is counted.
        """
        return self.num_heads_q * sum(self._visible_pairs(*lengths) for lengths in self.sequences)

    def _visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of visible pairs of one sequence and head."""
        if self.beyond_window is None:
            return visible_pairs(seqlen_q, seqlen_k, self.window_left, self.window_right)
        keys, rows = range(seqlen_k), (range(at, at + 1) for at in positions(seqlen_q, seqlen_k))
        if self.in_one_range:
            return sum(len(self.key_range(row, keys)) for row in rows)
        return sum(int(self.visible(row, keys).sum()) for row in rows)

    @property
    def q_bytes(self) -> int:
        return self.rows_q * self.head_dim * self.element_bytes

    @property
    def k_bytes(self) -> int:
        return self.rows_k * self.head_dim * self.cache_element_bytes

    @property
    def v_bytes(self) -> int:
        return self.rows_k * self.width_v * self.cache_element_bytes

    @property
    def out_bytes(self) -> int:
        return self.rows_q * self.width_v * self.element_bytes

    @property
    def lse_bytes(self) -> int:
        """Bytes of lse: one fp32 number per row (fp64 for float64)."""
        return self.rows_q * (8 if self.dtype == "float64" else 4)


def visible_pairs(
    seqlen_q: int, seqlen_k: int, window_left: int = UNLIMITED, window_right: int = UNLIMITED
) -> int:
    """Count the (query, key) pairs that are visible under a window aligned to the bottom right.

    Row ``i`` is at key ``i + seqlen_k - seqlen_q`` and sees from ``window_left`` keys before it to
    ``window_right`` keys after it.
    """
    offset = seqlen_k - seqlen_q
    ends = seqlen_q * seqlen_k
    if window_right != UNLIMITED:
        ends = _sum_clamped(offset + window_right + 1, seqlen_q, seqlen_k)
    starts = 0 if window_left == UNLIMITED else _sum_clamped(offset - window_left, seqlen_q, seqlen_k)
    return ends - starts


def _sum_clamped(first: int, count: int, most: int) -> int:
    """Sum ``first + i`` over ``0 <= i < count``, each term clamped between 0 and ``most``."""
    rising = max(0, min(count, -first))  # values before this index are 0
    full = max(rising, min(count, most - first))  # values from this index on are ``most``
    middle = full - rising
    return middle * (2 * first + rising + full - 1) // 2 + (count - full) * most


def blocks_of(seen: range, block: int) -> range:
    """Return the numbers of the blocks of ``block`` rows or keys that kernels visit for the range ``seen``.

    If the range is empty, they may visit one block.
    """
    last = -(-seen.stop // block)
    return range(min(seen.start // block, last), last)


def walks(
    call: Call, lengths: tuple[int, int], blocks: tuple[int, int], *, by_keys: bool = False
) -> list[range]:
    """Return the key blocks that each query block attends to.

    With ``by_keys``, return the query blocks that attend to each key block. ``lengths`` and ``blocks`` are
    (of queries, of keys), for one sequence.
    """
    seqlen_q, seqlen_k = lengths
    rows, keys, offset = positions(*lengths), range(seqlen_k), seqlen_k - seqlen_q
    if not by_keys:
        seen = (call.key_range(part, keys) for part in split(rows, blocks[0]))
        return [blocks_of(part, blocks[1]) for part in seen]
    seen = (call.row_range(rows, part) for part in split(keys, blocks[1]))
    return [blocks_of(range(part.start - offset, part.stop - offset), blocks[0]) for part in seen]


def visited_scores(call: Call, tile: tuple[int, int]) -> int:
    """Return the number of scores in the tiles (queries, keys) that kernels visit, for all query heads."""
    tiles = sum(len(part) for lengths in call.sequences for part in walks(call, lengths, tile))
    return call.num_heads_q * tiles * tile[0] * tile[1]


def least_bytes(call: Call, which: str) -> int:
    """Return the HBM traffic if every input is read once and every result is written once."""
    inputs = call.q_bytes + call.k_bytes + call.v_bytes
    if which == "forward":
        return inputs + call.out_bytes + call.lse_bytes
    # reads q, k, v, out and dout; writes dq, dk and dv
    return 2 * inputs + 2 * call.out_bytes + call.lse_bytes


def least_flops(call: Call, which: str) -> int:
    """Return the FLOPs for the visible scores.

    The forward pass has two products. The backward pass has five, one of which recomputes the scores.
    """
    if which == "forward":
        return 2 * call.visible_pairs * (call.head_dim + call.width_v)
    return 2 * call.visible_pairs * (3 * call.head_dim + 2 * call.width_v)
