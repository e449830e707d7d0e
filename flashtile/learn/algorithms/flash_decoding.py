"""Flash-Decoding: splitting the keys when there are too few queries to fill a GPU (Dao et al. 2023).

When a model generates text, each step has one query and all keys so far. FlashAttention-2 runs in parallel
over sequences, heads and blocks of rows. With one row and one sequence most of a GPU is idle while a few
thread blocks loop over a long cache. Here the keys are cut into num_splits parts, which are attended to in
parallel. Each part gives its own output O_s and lse_s, and a second, small kernel merges them:

    lse = log(sum exp(lse_s))        O = sum exp(lse_s - lse) O_s

K and V are still read once. Parallelism costs num_splits reads of Q, and (d + 1) numbers per row and split
that are written and read again. (https://crfm.stanford.edu/2023/10/12/flashdecoding.html)
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.learn.algorithms import flash2
from flashtile.learn.algorithms.call import LOWEST, blocks, chosen_blocks, place, start_softmax, store_results
from flashtile.learn.algorithms.memory import Array, Memory, Tile

MERGE_TILES = {
    "O": Tile("O = exp(m - m') O + exp(lse_s - m') O_s"),
    "l": Tile("l = l exp(m - m') + exp(lse_s - m')"),
    "m": Tile("m = max"),
}
"""Tiles of the second kernel, for the trace."""


def block_sizes(memory: Memory, seqlen_q: int, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return (Br, Bc). With few query rows, K, V and S take nearly all of SRAM."""
    block_m = max(1, min(seqlen_q, flash2.block_sizes(memory, head_dim, head_dim_v)[0]))
    rest = memory.sram_elements - block_m * (head_dim + head_dim_v + 2)
    return block_m, rest // (head_dim + head_dim_v + block_m)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    num_splits: int = 4,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse): out (seqlen_q, head_dim_v), lse (seqlen_q, 1).

    ``num_splits`` is the number of parts into which the keys are cut. Each part consists of whole blocks of
    keys. The last parts may be shorter or empty. The other arguments are those of
    :func:`flashtile.algorithms.call.place`.

    Examples:
        >>> from flashtile.algorithms import Memory, flash_decoding
        >>> q, k, v = torch.randn(1, 32), torch.randn(256, 32), torch.randn(256, 32)
        >>> out, lse = flash_decoding.forward(q, k, v, Memory(), num_splits=4)
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
    """
    call = place(memory, q, k, v, causal, window_size, softmax_scale)
    Q, K, V = call.Q, call.K, call.V
    Br, Bc = chosen_blocks(block_m, block_n, block_sizes(memory, Q.rows, Q.cols, V.cols))
    O_s = memory.empty("O_s", num_splits * Q.rows, V.cols, like=q)  # all rows of split 0, then of split 1
    LSE_s = memory.empty("lse_s", num_splits * Q.rows, 1, like=q)
    for split, parts in enumerate(split_blocks(K.rows, Bc, num_splits)):
        for rows in blocks(Q.rows, Br):
            with memory.sram("split", flash2.TILES, rows=rows) as sram:  # on a GPU, all splits run at once
                flash2.attend(sram, call, rows, parts)
                store_results(sram, O_s, LSE_s, of_split(split, rows, Q.rows))

    O, LSE = call.empty_results(memory)
    for rows in blocks(Q.rows, Br):
        merge(memory, O_s, LSE_s, O, LSE, rows, num_splits)
    memory.release(O_s, LSE_s)
    return O.tensor, LSE.tensor


def merge(
    memory: Memory, O_s: Array, LSE_s: Array, O: Array, LSE: Array, rows: range, num_splits: int
) -> None:
    """Merge the results of all splits by an online softmax over the splits. This is the second kernel."""
    with memory.sram("merge", MERGE_TILES, rows=rows) as sram:
        start_softmax(sram, len(rows), O.cols, like=O.tensor)
        for split in range(num_splits):
            o_s = sram.load(O_s, of_split(split, rows, O.rows))
            lse_s = sram.load(LSE_s, of_split(split, rows, O.rows))
            # lse is -inf in a split without visible keys
            m_new = torch.maximum(sram.m, lse_s.clamp(min=LOWEST))
            old, new = torch.exp(sram.m - m_new), torch.exp(lse_s - m_new)
            sram.O = old * sram.O + new * o_s
            sram.l = old * sram.l + new
            sram.m = m_new
        store_results(sram, O, LSE, rows)


def split_blocks(seqlen_k: int, block_n: int, num_splits: int) -> list[list[range]]:
    """Return the blocks of keys of each split. The last splits may have fewer blocks, or none.

    Raises:
        ValueError: num_splits is below 1.
    """
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    all_blocks = list(blocks(seqlen_k, block_n))
    each = -(-len(all_blocks) // num_splits)
    return [all_blocks[split * each : (split + 1) * each] for split in range(num_splits)]


def of_split(split: int, rows: range, seqlen_q: int) -> range:
    """Return the rows of O_s and lse_s that hold the results of a split for the query rows ``rows``."""
    return range(split * seqlen_q + rows.start, split * seqlen_q + rows.stop)
