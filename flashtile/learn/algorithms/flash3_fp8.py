"""FlashAttention-3 in FP8: half the bytes, twice the products per second, and two ways to keep errors small.

arXiv:2407.08608, section 3.3. An e4m3 number has 3 bits after its leading one. Rounding to e4m3 changes
numbers from 1/64 to 448 by up to 6 %, and smaller numbers by more. Values are stored as x / scale, with a
scale that makes the largest value 448.

Block quantisation. The largest outlier sets the scale of a whole tensor: numbers 30000 times smaller lose
bits, numbers 500000 times smaller become 0. With a scale for each block of rows, an outlier affects only its
block. This costs nothing extra: a tile of S, from one block of Q and one of K, is multiplied by both scales.

Incoherent processing. Outliers lie in a few columns, the same in Q and K, and the rounding errors of their
large products hide the rest of a score. An orthogonal matrix R spreads each row over all columns, while
(Q R)(K R)^T = Q K^T is unchanged. R is a Hadamard matrix with random signs. The rotation takes d log d
additions per row, which can be fused with the rotary embedding before it.

This is a simulation: numbers are rounded to e4m3, then multiplied and accumulated in the dtype of q. Hopper's
tensor cores accumulate with fewer bits; :func:`sum_products` shows what that costs, and what helps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.learn.algorithms.call import (
    blocks,
    check,
    chosen_blocks,
    nonzero,
    place,
    row_max,
    row_sum,
    start_softmax,
    store_results,
)
from flashtile.learn.algorithms.flash2 import block_sizes
from flashtile.learn.algorithms.memory import Memory, Sram, Tile

E4M3 = torch.float8_e4m3fn
TILES = {
    "S": Tile("S = Q K^T", "rows", "keys"),
    "P": Tile("P = e4m3(exp(S - m))", "rows", "keys", name="S"),  # in the place of S
    "l": Tile("l = l exp(m - m') + rowsum P"),
    "O": Tile("O = exp(m - m') O + P V"),
    "m": Tile("m = max"),
}
"""Tiles of the forward pass, for the trace."""

LARGEST = torch.finfo(E4M3).max
SCALE_BYTES = 4
SUM_BITS = 14
"""Significant bits of a sum in Hopper's FP8 tensor cores (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

INSTRUCTION = 32
"""Products that one FP8 instruction (wgmma) adds up for an element of the result."""

P_SCALE = 256.0
"""Factor that spreads the probabilities, at most 1, over e4m3's range; a power of 2 adds no rounding."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    block_scales: bool = True,
    incoherent: bool = True,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention with Q, K, V and P rounded to e4m3, an approximation.

    Args:
        block_scales: use a scale for each block of rows of Q, K and V; if False, one for each tensor.
        incoherent: rotate Q and K first; head_dim must be a power of 2.
        seed: seed of the rotation's random signs.

    The other arguments are those of :func:`flashtile.algorithms.call.place`. Each element of Q, K and V
    counts as one byte.

    Examples:
        >>> from flashtile.algorithms import Memory, flash3_fp8
        >>> q, k, v = torch.randn(3, 256, 32).unbind()  # one head, (seqlen, head_dim)
        >>> out, lse = flash3_fp8.forward(q, k, v, Memory())
        >>> bool((out - torch.softmax(q @ k.T * 32**-0.5, -1) @ v).abs().max() < 0.1)
        True
    """
    check(q, k, v, causal, window_size, softmax_scale)
    if incoherent:  # on a GPU, this is fused with the previous layer, so its traffic is not counted
        rotation = random_rotation(q, seed)
        q, k = q @ rotation, k @ rotation
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, q.shape[-1], v.shape[-1]))
    rows_of = {"Q": Br, "K": Bc, "V": Bc} if block_scales else dict.fromkeys("QKV", max(len(q), len(k), 1))
    (q8, q_scales), (k8, k_scales), (v8, v_scales) = (
        quantise(t, rows_of[name]) for name, t in (("Q", q), ("K", k), ("V", v))
    )
    call = place(memory, q8, k8, v8, causal, window_size, softmax_scale, element_bytes=1)
    Q, K, V = call.Q, call.K, call.V
    scales = {
        name: memory.place(f"{name} scale", values, SCALE_BYTES)
        for name, values in (("Q", q_scales), ("K", k_scales), ("V", v_scales))
    }

    def scale_of(sram: Sram, name: str, rows: range) -> Tensor:
        block = rows.start // rows_of[name]
        return sram.load(scales[name], range(block, block + 1))

    O, LSE = call.empty_results(memory)
    for rows in blocks(Q.rows, Br):
        with memory.sram("attention", TILES, rows=rows) as sram:
            q_i, q_scale = sram.load(Q, rows), scale_of(sram, "Q", rows)
            start_softmax(sram, len(rows), V.cols, like=q)
            for keys in call.visible_keys(sram, rows, blocks(K.rows, Bc)):
                with sram.scope(keys=keys):
                    k_j, v_j = call.load_keys(sram, keys)
                    k_scale, v_scale = scale_of(sram, "K", keys), scale_of(sram, "V", keys)
                    s = (q_i @ k_j.T) * (q_scale * k_scale * call.scale)  # one factor per tile of S
                    sram.S = call.mask.hide(s, rows, keys)
                    m_new = torch.maximum(sram.m, row_max(sram.S))
                    p = torch.exp(sram.S - m_new)
                    sram.P = round_to_e4m3(p * P_SCALE)
                    correction = torch.exp(sram.m - m_new)
                    sram.l = correction * sram.l + row_sum(p)
                    sram.O = correction * sram.O + (sram.P @ v_j) * (v_scale / P_SCALE)
                    sram.m = m_new
            store_results(sram, O, LSE, rows)
    return O.tensor, LSE.tensor


def quantise(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (values rounded to e4m3, scales (blocks, 1)), with one scale per ``block`` rows.

    x is approximately values * scale. The values keep the dtype of x.
    """
    values, scales = torch.empty_like(x), []
    for rows in blocks(x.shape[0], block):
        part = x[rows.start : rows.stop]
        scale = nonzero(part.abs().amax() / LARGEST)
        values[rows.start : rows.stop] = round_to_e4m3(part / scale)
        scales.append(scale)
    return values, torch.stack(scales)[:, None] if scales else x.new_ones((1, 1))


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round x to the nearest e4m3 numbers; the result has the dtype of x."""
    return x.to(E4M3).to(x.dtype)


class PartialSum(NamedTuple):
    """State of a sum after one instruction.

    ``added`` is what the instruction added, ``register`` the tensor core's sum after its low bits were cut
    off, and ``total`` the sum in fp32, to which the register has been promoted so far.
    """

    added: float
    register: float
    total: float


def sum_products(products: Tensor, promote: int | None = None) -> list[PartialSum]:
    """Sum products as Hopper's FP8 tensor cores do: each instruction cuts the sum to SUM_BITS bits.

    With ``promote``, a multiple of INSTRUCTION, the sum has two levels: after so many products the register
    is added to a sum in fp32 and starts again from 0, so that it stays small and loses few bits.

    Examples:
        >>> from flashtile.algorithms import flash3_fp8
        >>> products = torch.full((16384,), 0.3125 * 0.34375)  # two numbers of e4m3
        >>> one = flash3_fp8.sum_products(products)[-1].register
        >>> two = flash3_fp8.sum_products(products, promote=128)[-1].total
        >>> abs(two - products.sum()) < abs(one - products.sum())
        tensor(True)
    """
    register, total, states = 0.0, 0.0, []
    for i, part in enumerate(products.double().split(INSTRUCTION), 1):
        added = part.sum().item()
        mantissa, exponent = math.frexp(register + added)
        register = math.ldexp(math.trunc(math.ldexp(mantissa, SUM_BITS)), exponent - SUM_BITS)
        states.append(PartialSum(added, register, total))
        if promote and i * INSTRUCTION % promote == 0:
            total = torch.tensor(total + register, dtype=torch.float32, device="cpu").item()
            states[-1] = PartialSum(added, register, total)
            register = 0.0
    return states


def random_rotation(like: Tensor, seed: int) -> Tensor:
    """Return an orthogonal matrix (head_dim, head_dim): random signs times Sylvester's Hadamard matrix.

    Raises:
        ValueError: head_dim is not a power of 2.
    """
    head_dim = like.shape[-1]
    if head_dim & (head_dim - 1):
        raise ValueError(f"incoherent processing needs a head_dim that is a power of 2, got {head_dim}")
    hadamard = like.new_ones((1, 1))
    while len(hadamard) < head_dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (head_dim, 1), generator=generator, device="cpu") * 2 - 1).to(like)
    return signs * hadamard / head_dim**0.5
