"""What the attention kernels take, forward and backward, and what their step functions hand to one another.

Triton specialises every integer of a tuple argument, whatever ``do_not_specialize`` says. So a kernel takes
the fields one by one, in this order, and makes the tuples of them first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for, its one constant. What a call does not use costs it nothing."""

    VARLEN: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_MASK: bool
    MASK_HAS_ROWS: bool
    """The mask differs from row to row."""
    HAS_BIAS: bool
    BIAS_HAS_ROWS: bool
    HAS_PADDING: bool
    HAS_SCORE_MOD: bool
    """Scores are more than raw products times a positive scale."""
    EVEN_M: bool
    """All sequences have whole blocks of rows."""
    EVEN_N: bool
    """All sequences have whole blocks of keys."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """Columns of a tile of q or k: HEAD_DIM padded to a power of two."""
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    WIDE: bool
    """A tile's own extent in memory does not fit 32 bits."""
    WIDE_CELLS: bool
    """The mask or bias of one head does not fit 32 bits."""
    HAS_CHUNK: bool
    HAS_DROPOUT: bool
    FINE_DROPOUT: bool
    """Numbers of 15 bits decide, not of 7."""
    HIDES: bool
    """Any block may hold hidden keys, so that all of them take a mask, in one run."""
    PRECISION: str
    """Of the products, in Triton's terms (``input_precision``)."""
    SEQUENCES_FIRST: bool = False
    """Programs of one head follow one another through the batch, which shares the bias of that head."""
    SCORE_MOD: Any = None
    """A user's functions, ``@triton.jit`` (``mods.functions``): of scores, of masks, and what adds to the
    gradients of the tensors that the first reads."""
    MASK_MOD: Any = None
    ADD_GRADIENTS: Any = None
    GUARD_SCORES: bool = False
    """SCORE_MOD may give NaN where no score is seen; GUARD_FACTORS: so may its derivative."""
    GUARD_FACTORS: bool = False
    OWN: int = 0
    """Own rows or keys to a block of a block mask; 0 without one."""
    PARTS: int = 1
    """Blocks of the other sequence to a block of a block mask."""
    FORM: str = ""
    """Of attention weights (``attn.problem.WeightsProblem``)."""
    TOP: int = 0
    """Weights of a row that are kept, and that number padded to a power of two."""
    BLOCK_TOP: int = 0


class Strides(NamedTuple):
    """Of q, k or v: elements from one sequence, token and head to the next. Packed sequences have batch 0."""

    batch: Any
    token: Any
    head: Any


class Lengths(NamedTuple):
    """Integers of a call. Their values lead to no new compilation."""

    alibi_stride: Any
    """From the slopes of one sequence to the next; 0 if all share them."""
    num_heads_q: Any
    group_size: Any
    """Query heads to a key/value head."""
    seqlen_q: Any
    """The longest sequence's."""
    seqlen_k: Any
    total_q: Any
    total_k: Any
    window_left: Any
    window_right: Any
    attention_chunk: Any
    """Positions to a chunk; 0 without chunks."""
    drop_threshold: Any
    """Of dropout: numbers of 15 bits below it drop their probability."""


class CellStrides(NamedTuple):
    """Of what broadcasts to all scores: elements from one sequence, query head, row and key to the next."""

    batch: Any
    head: Any
    row: Any
    key: Any


class Mods(NamedTuple):
    """What hides and changes scores otherwise than by distance; None is what the call does not have. Masks
    are True for what takes part."""

    mask: Any
    mask_strides: Any
    padding: Any
    """Of keys, by sequence."""
    padding_stride_b: Any
    padding_stride_k: Any
    key_bounds: Any
    """[batch, 2]: each sequence's first key that takes part, and the one behind the last."""
    bias: Any
    bias_strides: Any
    seed: Any
    """Of dropout's generator, with ``offset``; 0 without dropout."""
    offset: Any


class Numbers(NamedTuple):
    """Of the scores."""

    softmax_scale: Any
    scale_log2: Any
    """softmax_scale * log2(e)."""
    softcap: Any
    keep_scale: Any
    """1 / (1 - dropout_p), with dropout_p as it is rounded."""


class Sequence(NamedTuple):
    """One of the batch: its number, and its first tokens in memory and lengths."""

    b: Any
    start_q: Any
    start_k: Any
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A program's rows or keys: of which sequence and query head, the first, ``offset`` (row i stands at key
    i + offset), the ALiBi slope.

    ``captured`` are the tensors of a user's functions, ``listed`` a list of a block mask; None without.
    """

    b: Any
    head: Any
    start: Any
    offset: Any
    slope: Any
    captured: Any
    listed: Any


class Cells(NamedTuple):
    """Where the scores of a tile lie. ``rows`` and ``keys``, positions in their sequence, broadcast against
    each other to the tile: [BLOCK_M, 1] and [1, BLOCK_N], or [1, BLOCK_M] and [BLOCK_N, 1]. None of them is
    None: Triton 3.6 gives back no tuple that holds one."""

    b: Any
    head: Any
    rows: Any
    keys: Any
    positions: Any
    """At which the rows stand among the keys."""
    distance: Any
    """Key minus the row's own position, in the tile's shape."""
