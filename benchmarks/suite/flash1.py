"""FlashAttention's forward pass (Dao et al. 2022, arXiv:2205.14135, Algorithm 1) in its own loop order.

The outer loop is over keys and the inner loop over queries, so one program computes a whole head. It keeps a
block of keys and values on chip and walks all rows, whose output, maximum and sum it reads and writes each
time. The output is divided by the sum at every step, and hidden tiles are computed like others.
FlashAttention-2 changed all of this. The kernel is measured as the contestant "flash1-loops".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.config import KernelConfig, TokenStrides, padded, token_strides
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import Matrix, load_tile
from flashtile.backends.portable.tiles import head_of, store_tile


class Flash1Pointers(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    partial: Any
    row_max: Any
    row_sum: Any


class Flash1Strides(NamedTuple):
    q: TokenStrides
    k: TokenStrides
    v: TokenStrides


class Flash1Lengths(NamedTuple):
    num_heads_q: Any
    group_size: Any
    seqlen_q: Any
    seqlen_k: Any


@dataclass(frozen=True)
class Flash1Variant:
    """Constants of the kernel."""

    CAUSAL: bool
    EVEN_M: bool
    EVEN_N: bool
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    WIDE: bool
    """Whether offsets within a tile need 64 bits."""
    PRECISION: str


@triton.jit
def attend_tile(scores, v, out, row_max, row_sum, C: tl.constexpr):
    """Update each row's output, maximum and sum with one tile of keys.

    These are lines 10 to 12 of Algorithm 1 in FlashAttention's paper (Dao et al. 2022, arXiv:2205.14135).

    scores [BLOCK_M, BLOCK_N], v [BLOCK_N, BLOCK_DV]. ``row_max`` is -inf before a row has seen a key. The
    maximum over a tile is -inf if the row sees no key of the tile.
    """
    tile_max = tl.max(scores, 1)
    new_max = tl.maximum(row_max, tile_max)
    p = tl.exp(scores - tl.where(tile_max == -float("inf"), 0.0, tile_max)[:, None])
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    old, new = tl.exp(row_max - shift), tl.exp(tile_max - shift)
    new_sum = old * row_sum + new * tl.sum(p, 1)
    divisor = tl.where(new_sum == 0.0, 1.0, new_sum)
    product = tl.dot(p.to(v.dtype), v, input_precision=C.PRECISION)
    out = ((row_sum * old)[:, None] * out + new[:, None] * product) / divisor[:, None]
    return out, new_max, new_sum


@kernel(do_not_specialize=("lengths",))
def flash1_kernel(pointers, strides, lengths, softmax_scale, C: tl.constexpr):
    """Compute out of one head per program.

    Grid: (heads * batch,). q, k, v are (batch, seqlen, heads, head_dim) with any strides, and out is
    contiguous.

    partial [batch, num_heads_q, seqlen_q, HEAD_DIM_V], row_max and row_sum [batch, num_heads_q, seqlen_q] are
    fp32. The caller fills them with 0, -inf and 0. After the last key block, the output is written to out.
    After earlier key blocks, it is written to partial. Line numbers in comments are those of the paper's
    Algorithm 1.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    num_heads_q, seqlen_q, seqlen_k = lengths.num_heads_q, lengths.seqlen_q, lengths.seqlen_k
    pid = tl.program_id(0)
    b = pid // num_heads_q
    head = pid % num_heads_q
    head_kv = head // lengths.group_size
    q_rows = head_of(pointers.q, strides.q, b, 0, head, seqlen_q)
    keys = head_of(pointers.k, strides.k, b, 0, head_kv, seqlen_k)
    values = head_of(pointers.v, strides.v, b, 0, head_kv, seqlen_k)
    first_row = pid.to(tl.int64) * seqlen_q
    partials = Matrix(pointers.partial + first_row * C.HEAD_DIM_V, C.HEAD_DIM_V, seqlen_q)
    out_base = pointers.out + (b.to(tl.int64) * seqlen_q * num_heads_q + head) * C.HEAD_DIM_V
    offset = seqlen_k - seqlen_q

    key_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    for j in range(0, key_blocks):  # lines 5 and 6
        key_start = j * BLOCK_N
        k_tile = load_tile(keys, key_start, BLOCK_N, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_N, C.WIDE)
        v_tile = load_tile(values, key_start, BLOCK_N, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_N, C.WIDE)
        for i in range(0, tl.cdiv(seqlen_q, BLOCK_M)):  # lines 7 and 8
            start = i * BLOCK_M
            rows = start + tl.arange(0, BLOCK_M)
            inside = rows < seqlen_q
            q_tile = load_tile(q_rows, start, BLOCK_M, C.HEAD_DIM, C.BLOCK_D, not C.EVEN_M, C.WIDE)
            o_tile = load_tile(partials, start, BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV, not C.EVEN_M, C.WIDE)
            m_rows = tl.load(pointers.row_max + first_row + rows, mask=inside, other=-float("inf"))
            l_rows = tl.load(pointers.row_sum + first_row + rows, mask=inside, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION) * softmax_scale  # line 9
            if C.CAUSAL or not C.EVEN_N:
                columns = key_start + tl.arange(0, BLOCK_N)
                seen = (columns < seqlen_k)[None, :]
                if C.CAUSAL:
                    seen = seen & (columns[None, :] <= (rows + offset)[:, None])
                scores = tl.where(seen, scores, -float("inf"))
            o_tile, m_rows, l_rows = attend_tile(scores, v_tile, o_tile, m_rows, l_rows, C)
            if j == key_blocks - 1:  # lines 12 and 13
                store_tile(
                    out_base, start, seqlen_q, num_heads_q * C.HEAD_DIM_V, o_tile, BLOCK_M, C.HEAD_DIM_V,
                    C.BLOCK_DV,
                )  # fmt: skip
            else:
                store_tile(
                    partials.base, start, seqlen_q, C.HEAD_DIM_V, o_tile, BLOCK_M, C.HEAD_DIM_V, C.BLOCK_DV
                )
            tl.store(pointers.row_max + first_row + rows, m_rows, mask=inside)
            tl.store(pointers.row_sum + first_row + rows, l_rows, mask=inside)
        tl.debug_barrier()  # the next key block reads these rows, perhaps in other threads


def config_of(element_bytes: int, block_d: int) -> KernelConfig:
    """Return tiles that compile without spills. They were not tuned on a GPU."""
    if element_bytes == 4:
        return KernelConfig(32, 32, 4, 1)
    return KernelConfig(64, 128, 4, 1) if block_d <= 64 else KernelConfig(64, 64, 8, 1)


def flash1_variant(
    head_dim: int,
    head_dim_v: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    config: KernelConfig,
    wide: bool = False,
) -> Flash1Variant:
    return Flash1Variant(
        CAUSAL=causal,
        EVEN_M=seqlen_q % config.BLOCK_M == 0,
        EVEN_N=seqlen_k % config.BLOCK_N == 0,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        BLOCK_D=padded(head_dim),
        BLOCK_DV=padded(head_dim_v),
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDE=wide,
        PRECISION="ieee",
    )


class Flash1Launch:
    """``(q, k, v) -> out`` for tensors (batch, seqlen, heads, head_dim) of one signature.

    There must be at least one key.
    """

    def __init__(self, causal: bool, softmax_scale: float) -> None:
        self._causal, self._scale = causal, softmax_scale
        self._kernel: CachedLaunch | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, seqlen_q, heads, head_dim = q.shape
        out = q.new_empty(batch, seqlen_q, heads, v.shape[-1])
        rows: dict[str, Any] = {"dtype": torch.float32}
        partial = q.new_zeros(batch, heads, seqlen_q, v.shape[-1], **rows)  # line 2
        row_max = q.new_full((batch, heads, seqlen_q), -torch.inf, **rows)
        row_sum = q.new_zeros(batch, heads, seqlen_q, **rows)
        if self._kernel is None:
            config = config_of(q.element_size(), padded(max(head_dim, v.shape[-1])))
            strides = Flash1Strides(*map(token_strides, (q, k, v)))
            lengths = Flash1Lengths(heads, heads // k.shape[2], seqlen_q, k.shape[1])
            block = max(config.BLOCK_M, config.BLOCK_N)
            wide = any(block * tensor.stride(1) >= 2**31 for tensor in (q, k, v))
            variant = flash1_variant(head_dim, v.shape[-1], seqlen_q, k.shape[1], self._causal, config, wide)
            scalars = (strides, lengths, self._scale)
            self._kernel = CachedLaunch(
                flash1_kernel, batch * heads, scalars, (variant,), config, pointers=Flash1Pointers
            )
        self._kernel(q.device, q, k, v, out, partial, row_max, row_sum)
        return out
