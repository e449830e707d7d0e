"""Structures that the attention kernels take as arguments and pass to their step functions."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.backends.common.config import TokenStrides
from flashtile.problems.attention import OptionalTensors
from flashtile.problems.masking import MaskConstants


@dataclass(frozen=True)
class AttentionVariant(MaskConstants):
    """Constants of a kernel, passed as one argument. Features that a call does not use cost nothing."""

    VARLEN: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_MASK: bool
    MASK_HAS_ROWS: bool
    """Whether the mask differs from row to row."""
    HAS_BIAS: bool
    BIAS_HAS_ROWS: bool
    HAS_PADDING: bool
    SCALED_SCORES: bool
    """Scores are scaled before the softmax, because they are more than raw products times a positive scale.
    Otherwise the softmax scales raw products."""
    EVEN_M: bool
    """Whether all sequences consist of whole blocks of rows, so that no load or store of rows is masked."""
    EVEN_N: bool
    """Whether all sequences consist of whole blocks of keys. Neither holds for packed sequences, whose
    lengths the host does not know."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    """Columns of a tile of q or k: HEAD_DIM padded to a power of two."""
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    WIDE: bool
    """Whether offsets within a tile need 64 bits."""
    WIDE_SCORES: bool
    """Whether offsets within the mask or bias of one head need 64 bits."""
    HAS_DROPOUT: bool
    MASKS_EVERY_BLOCK: bool
    """Whether any block may have hidden keys, so that one loop masks every block."""
    PRECISION: str
    """Triton's ``input_precision`` of the matrix products."""
    SEQUENCES_FIRST: bool = False
    """Whether consecutive programs take one head of all sequences, because the sequences share its bias."""
    SCORE_MOD: Any = None
    """``score_mod`` as a ``@triton.jit`` function (:mod:`functions`). MASK_MOD is ``mask_mod``;
    ADD_GRADIENTS adds to the gradients of the tensors that ``score_mod`` reads."""
    MASK_MOD: Any = None
    ADD_GRADIENTS: Any = None
    GUARD_SCORES: bool = False
    """Whether SCORE_MOD may return NaN for hidden scores; GUARD_FACTORS: whether its derivative may."""
    GUARD_FACTORS: bool = False
    HAS_TANGENTS: bool = False
    """Whether the forward kernel also computes the tangents of its results (:class:`TangentPointers`)."""
    MASK_BLOCK: int = 0
    """Size of a mask block in rows, or in keys if a program computes results of keys (dk, dv). 0 without a
    block mask."""
    FULL: Any = None
    """With a block mask: the variant for its full blocks, equal to this one but without MASK_MOD."""
    TILES_PER_MASK_BLOCK: int = 1
    """Tiles per mask block in the direction in which a program loops: keys, or rows for dk and dv."""
    FORM: str = ""
    """Form of the attention weights (``WeightsProblem.form``); "" in other kernels."""
    TOP: int = 0
    """Number of weights kept per row; BLOCK_TOP is that number padded to a power of two."""
    BLOCK_TOP: int = 0

    @property
    def has_natural_scores(self) -> bool:
        """Whether the forward has scores in natural units, the units of a bias and of SCORE_MOD.

        Only these can fill whole rows with large finite scores, such as -1e9 (``tiles.log2_factor``).
        """
        return self.HAS_BIAS or self.SCORE_MOD is not None


OPTIONAL = (*OptionalTensors._fields, "key_bounds", "captured", "lists")
"""Optional pointers that all kernels take after their own; None where a call does not use one.

``key_bounds`` [batch, 2] holds, for each sequence, the first key that is not padding and the index after the
last such key.
``captured`` holds the tensors that a user's functions read, ``lists`` the block mask: see
:class:`functions.Captured` and :class:`functions.Lists`.
"""


def attention_pointers(name: str, own: str, module: str) -> Any:
    """Return a NamedTuple type for a kernel's tensors, which the named module keeps under its name.

    ``own`` names the tensors of this kernel, separated by spaces. The names in :data:`OPTIONAL` follow.
    """
    return namedtuple(name, (*own.split(), *OPTIONAL), module=module)


class ScoreStrides(NamedTuple):
    """Strides, in elements, of a mask or bias that broadcasts to all scores."""

    batch: Any
    head: Any
    row: Any
    key: Any


class PaddingStrides(NamedTuple):
    """Strides of a padding mask, in elements."""

    batch: Any
    key: Any


class AttentionStrides(NamedTuple):
    """Strides of the inputs."""

    q: TokenStrides
    k: TokenStrides
    v: TokenStrides
    mask: ScoreStrides
    padding: PaddingStrides
    bias: ScoreStrides


class AttentionLengths(NamedTuple):
    """Integers of a call. Kernels are not specialized on their values."""

    alibi_stride: Any
    """Elements from the slopes of one sequence to those of the next; 0 if all sequences share them."""
    num_heads_q: Any
    group_size: Any
    """Query heads per key/value head."""
    seqlen_q: Any
    """Length of the longest sequence of queries; ``seqlen_k``: of keys."""
    seqlen_k: Any
    total_q: Any
    total_k: Any
    mask: Any
    """A :class:`~flashtile.problems.masking.KernelMask`. Without chunks, ``attention_chunk`` is 0."""
    drop_threshold: Any
    """Dropout drops a probability if its 15 random bits are below this threshold."""


class AttentionNumbers(NamedTuple):
    """Floating-point scalars of a call, applied to scores and probabilities."""

    softmax_scale: Any
    scale_log2: Any
    """softmax_scale * log2(e)."""
    softcap: Any
    keep_scale: Any
    """1 / (1 - dropout_p)."""


class AttentionCall(NamedTuple):
    """All arguments of a launch except the constants, as the step functions take them."""

    pointers: Any
    strides: AttentionStrides
    lengths: AttentionLengths
    numbers: AttentionNumbers
    seed: Any
    """State of dropout's generator, together with ``rng_offset``. Both are 0 without dropout."""
    rng_offset: Any


class AttentionSequence(NamedTuple):
    """A sequence of the batch: its number, its first query and key tokens in memory, and its lengths."""

    b: Any
    start_q: Any
    start_k: Any
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A program's rows or keys: sequence, query head, the first row or key, ``offset`` (row i stands at key
    i + offset) and the ALiBi slope."""

    b: Any
    head: Any
    start: Any
    offset: Any
    slope: Any


class ScoreIndices(NamedTuple):
    """Indices of the scores of a tile: sequence, query head, rows and keys.

    ``rows`` and ``keys``, positions in their sequence, broadcast against each other to the tile: [BLOCK_M, 1]
    and [1, BLOCK_N], or [1, BLOCK_M] and [BLOCK_N, 1]. No field may be None: a function of Triton 3.6 cannot
    return a tuple that holds None (3.7 can).
    """

    b: Any
    head: Any
    rows: Any
    keys: Any
    positions: Any
    """Positions of the rows among the keys."""
    distance: Any
    """Key minus the row's position among the keys, in the tile's shape."""
