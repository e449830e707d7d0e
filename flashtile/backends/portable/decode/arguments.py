"""Arguments and constants of the kernel that attends to a cache.

:mod:`schedule` defines *n_block* and *work tile*.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.backends.portable.decode.append import AppendVariant
from flashtile.backends.portable.decode.schedule import Layout


@dataclass(frozen=True)
class DecodeVariant(Layout):
    """Constants of the attention kernel, passed as one argument."""

    PAGE_SIZE: int
    """Tokens per page; 0 for a dense cache."""
    HAS_BATCH_IDX: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_TREE: bool
    HAS_PRIOR: bool
    HAS_QV: bool
    """Whether scores include the products of ``qv`` with the values. Not with a cache in e4m3."""
    HAS_SCORE_MOD: bool
    """Whether scores are more than raw products times a positive scale, so that their order may differ."""
    SOFTMAX_MAX: str
    """Kind of unified maximum (:mod:`unified_max`): "none", "number" (one for all heads) or "head" (one for
    each query head)."""
    DESCALE: str
    """Scales of the cache: "none", "head" (one per head), "block" (per head of each page, or of each row of a
    dense cache) or "sequence" (per head of each sequence)."""
    E4M3: bool
    """Whether the cache is in FP8; products are then in float16, unless queries are in float32."""
    E4M3_BITS: bool
    """Whether e4m3 elements are decoded in software."""
    E4M3_PAIRS: bool
    """Whether the cache is viewed as pairs of elements; even and odd columns are multiplied separately."""
    STREAM_K: bool
    """Whether programs share all n_blocks equally (stream-K, :mod:`schedule`)."""
    SPLIT: bool
    """Whether a work tile may have several splits; always True if STREAM_K."""
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    WIDE: bool
    """Whether offsets into the cache need 64 bits."""
    PDL: bool
    """Programmatic dependent launch: the combining kernel may start before this one has ended."""
    PREFETCH: int
    """How many n_blocks before the end of a work tile the next work tile's first n_blocks are prefetched to
    the L2 cache. In a program's last work tile, dependent kernels are launched at this point instead. 0: no
    prefetch; dependent kernels are launched at the start."""
    PRECISION: str
    APPEND: AppendVariant | None
    """How the kernel appends a new token of each sequence and rotates the queries. None: it does neither."""

    @property
    def faults_ahead(self) -> bool:
        """Whether a work tile's pages are checked before the loop over its n_blocks. Within the loop the
        check is free for small tiles; for other tiles, the loop has no register to spare."""
        return self.PAGE_SIZE != 0 and (self.BLOCK_M > 16 or self.E4M3)

    @property
    def one_page(self) -> bool:
        """Whether an n_block lies within one page."""
        return self.PAGE_SIZE % self.BLOCK_N == 0

    @property
    def sums_late(self) -> bool:
        """Whether a row's exponentials are summed over columns only after the last n_block.

        In tiles of few rows, several warps share a row and would have to exchange sums in each n_block.
        """
        return self.BLOCK_M < 64


class DecodePointers(NamedTuple):
    """Tensors of the call; None for each that the call does not use."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    partial: Any
    new: Any
    """:class:`append.AppendPointers` of the new tokens, if C.APPEND is given."""
    cache_seqlens: Any
    cache_leftpad: Any
    cache_batch_idx: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    alibi_slopes: Any
    sink: Any
    k_descale: Any
    v_descale: Any
    tree_mask: Any
    prior_out: Any
    prior_lse: Any
    softmax_max: Any
    qv: Any


class DecodeStrides(NamedTuple):
    """Strides between sequences (or pages), tokens and heads, in elements.

    The fields are flat: after a branch, Triton 3.6 forgets a stride of 1 in a structure within a structure.
    """

    q_batch: Any
    q_token: Any
    q_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any


class OuterStrides(NamedTuple):
    """Strides between sequences (for scales of an FP8 cache: pages or sequences), in elements; 0 if all
    share one entry. The kernel is not specialized on their values, since no wide load depends on them."""

    table_stride: Any
    alibi_stride: Any
    k_descale_stride: Any
    v_descale_stride: Any
    tree_stride: Any


class DecodeNumbers(NamedTuple):
    """Floating-point scalars of the call, applied to scores."""

    softmax_scale: Any
    scale_log2: Any
    """softmax_scale * log2(e)."""
    softcap: Any
    softmax_max: Any
    """Unified maximum, subtracted from scores in natural units; None for the online maximum."""


class DecodeCall(NamedTuple):
    """The kernel's arguments, as its step functions pass them on."""

    pointers: Any
    strides: Any
    outer: Any
    lengths: Any
    numbers: Any
    num_blocks: Any
    """Pages, or rows of a dense cache."""
    splits: Any
    new_strides: Any
    """:class:`append.AppendStrides` of the new tokens, or None, like ``new_lengths``."""
    new_lengths: Any
