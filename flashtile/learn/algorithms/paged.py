"""PagedAttention: a cache of keys and values in pages, which a block table locates.

Kwon et al. 2023, arXiv:2309.06180. The cache of a sequence grows by one token per step, to a length that is
not known in advance. Reserving room for the longest sequence wastes most of the memory. So HBM is one pool of
pages of page_size tokens. The block table of a sequence lists the physical page of each logical page:
logical pages are consecutive, physical pages may lie anywhere. A sequence wastes less than one page.

Tables may share pages. A fork copies the table and adds a reference to each page. Full pages are never
written again. Before a token is appended to a page with several references, that page is copied
(copy-on-write). Two answers to one prompt store the prompt once.

Attention does not change: it is FlashAttention-2 whose blocks of keys are pages, found through the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.learn.algorithms import flash2
from flashtile.learn.algorithms.call import Head, Mask, blocks, check, store_results
from flashtile.learn.algorithms.memory import Memory, Sram, SramExceededError
from flashtile.problems.masking import CAUSAL

TABLE_ENTRY_BYTES = 4


class PagedCache:
    """K and V of all sequences in one pool of pages.

    Args:
        memory: memory whose HBM holds the pool.
        num_pages, page_size: pages in the pool, tokens in a page.
        head_dim, head_dim_v: head sizes of K and V.
        like: a tensor of the dtype that is stored.

    Attributes:
        tables: physical pages of each sequence, in the order of its tokens.
        lengths: number of tokens of each sequence.
        ref_counts: number of tables that contain each physical page.
    """

    def __init__(
        self, memory: Memory, num_pages: int, page_size: int, head_dim: int, head_dim_v: int, like: Tensor
    ):
        self.memory, self.page_size = memory, page_size
        self.K = memory.empty("K", num_pages * page_size, head_dim, like)
        self.V = memory.empty("V", num_pages * page_size, head_dim_v, like)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.ref_counts = [0] * num_pages

    def append(self, sequence: str, k: Tensor, v: Tensor) -> None:
        """Append one token's key (1, head_dim) and value (1, head_dim_v) to a sequence."""
        table, length = self.tables.setdefault(sequence, []), self.lengths.setdefault(sequence, 0)
        if length == len(table) * self.page_size:
            table.append(self._take_page(sequence))
            self._record("allocate", sequence, table[-1])
        elif self.ref_counts[table[-1]] > 1:
            self._copy_last_page(sequence)
        slot = table[-1] * self.page_size + length % self.page_size
        self.lengths[sequence] += 1
        with self.memory.sram(kernel="append") as sram:
            sram.store(self.K, k, range(slot, slot + 1))
            sram.store(self.V, v, range(slot, slot + 1))
        self._record("append", sequence, table[-1])

    def fork(self, parent: str, child: str) -> None:
        """Create the sequence ``child``, which shares all pages of ``parent``. No key or value is copied."""
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]
        for page in self.tables[child]:
            self.ref_counts[page] += 1
        self._record("fork", child)

    def free(self, sequence: str) -> None:
        """Remove a sequence. Pages that no other sequence uses become free."""
        del self.lengths[sequence]
        for page in self.tables.pop(sequence):
            self.ref_counts[page] -= 1
        self._record("free", sequence)

    def attend(self, sequence: str, q: Tensor, softmax_scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of causal attention of q over the cache of a sequence.

        q (seqlen_q, head_dim) are the queries of the last seqlen_q tokens. Each block of keys is one page.
        """
        memory, length = self.memory, self.lengths[sequence]
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        Q = memory.place(f"Q.{sequence}", q)
        O = memory.empty(f"O.{sequence}", Q.rows, self.V.cols, like=q)
        LSE = memory.empty(f"lse.{sequence}", Q.rows, 1, like=q)
        call = Head(Q, self.K, self.V, scale, Mask(Q.rows, length, CAUSAL))
        pages = torch.tensor(self.tables[sequence], device=q.device)[:, None]
        table = memory.place(f"table.{sequence}", pages, TABLE_ENTRY_BYTES)

        def load_keys(sram: Sram, keys: range) -> tuple[Tensor, Tensor]:
            logical = keys.start // self.page_size
            physical = int(sram.load(table, range(logical, logical + 1)))
            first = physical * self.page_size
            return call.load_keys(sram, range(first, first + len(keys)))

        for rows in blocks(Q.rows, self._rows_next_to_a_page(Q.cols, O.cols)):
            with memory.sram("attention", flash2.TILES, rows=rows) as sram:
                flash2.attend(sram, call, rows, blocks(length, self.page_size), load_keys)
                store_results(sram, O, LSE, rows)
        memory.release(Q, table)
        return O.tensor, LSE.tensor

    def _rows_next_to_a_page(self, head_dim: int, head_dim_v: int) -> int:
        """Return the number of query rows that fit into SRAM together with one page of K and V."""
        page = self.page_size * (head_dim + head_dim_v) + TABLE_ENTRY_BYTES
        rows = (self.memory.sram_elements - page) // (head_dim + head_dim_v + self.page_size + 2)
        if rows < 1:
            raise SramExceededError(
                f"sram_bytes must hold a page of {self.page_size} tokens and a query, "
                f"got {self.memory.sram_bytes}"
            )
        return rows

    def _take_page(self, sequence: str) -> int:
        if 0 not in self.ref_counts:
            raise MemoryError(f"all {len(self.ref_counts)} pages are held: sequence {sequence!r} cannot grow")
        page = self.ref_counts.index(0)
        self.ref_counts[page] = 1
        return page

    def _copy_last_page(self, sequence: str) -> None:
        table = self.tables[sequence]
        source, page = table[-1], self._take_page(sequence)
        used = self.lengths[sequence] % self.page_size
        with self.memory.sram(kernel="copy on write") as sram:
            for array in (self.K, self.V):
                old = range(source * self.page_size, source * self.page_size + used)
                new = range(page * self.page_size, page * self.page_size + used)
                sram.store(array, sram.load(array, old), new)
        table[-1] = page
        self.ref_counts[source] -= 1
        self._record("copy_on_write", sequence, page, source)

    def _record(self, op: str, sequence: str, page: int | None = None, source: int | None = None) -> None:
        """Record a change of the block tables, with the tables and reference counts after the change."""
        data = {
            "op": op,
            "sequence": sequence,
            "block": page,
            "source": source,
            "tables": {name: list(table) for name, table in self.tables.items()},
            "lengths": dict(self.lengths),
            "ref_counts": list(self.ref_counts),
        }
        self.memory.record("page", "table", op=op, data=data)


def pages_of(tokens: int, page_size: int) -> int:
    """Return the number of pages that ``tokens`` tokens need.

    Raises:
        ValueError: page_size is below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    return -(-tokens // page_size)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    page_size: int = 16,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Write k and v to pages, and return (out, lse) of causal attention over them.

    q (seqlen_q, head_dim) are the queries of the last seqlen_q tokens.

    Examples:
        >>> from flashtile.algorithms import Memory, paged
        >>> q, k, v = torch.randn(1, 32), torch.randn(256, 32), torch.randn(256, 32)
        >>> out, lse = paged.forward(q, k, v, Memory(), page_size=16)
        >>> torch.testing.assert_close(out, torch.softmax(q @ k.T * 32**-0.5, -1) @ v)
    """
    check(q, k, v, True, softmax_scale=softmax_scale)
    cache = PagedCache(memory, pages_of(k.shape[0], page_size), page_size, k.shape[1], v.shape[1], like=k)
    for token in range(k.shape[0]):
        cache.append("A", k[token : token + 1], v[token : token + 1])
    return cache.attend("A", q, softmax_scale)


def forked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    *,
    prompt: int,
    page_size: int = 16,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one query for each of two sequences that share a prompt.

    q is (2, head_dim), out (2, head_dim_v) and lse (2, 1). The first ``prompt`` tokens of k and v are
    sequence A. It is forked into B, and the remaining tokens are appended to A and B in turn.

    Raises:
        ValueError: ``prompt`` is below 1 or above the number of tokens of k.

    Examples:
        >>> from flashtile.algorithms import Memory, paged
        >>> q, k, v = torch.randn(2, 32), torch.randn(40, 32), torch.randn(40, 32)
        >>> out, lse = paged.forked(q, k, v, Memory(), prompt=30, page_size=16)
        >>> out.shape  # the next token of either sequence
        torch.Size([2, 32])
    """
    check(q, k, v, True, softmax_scale=softmax_scale)
    if not 0 < prompt <= k.shape[0]:
        raise ValueError(f"prompt must be from 1 to the {k.shape[0]} tokens of k, got {prompt}")
    num_pages = pages_of(k.shape[0], page_size) + 2  # for the copied page and a second partial page
    cache = PagedCache(memory, num_pages, page_size, k.shape[1], v.shape[1], like=k)
    for token in range(prompt):
        cache.append("A", k[token : token + 1], v[token : token + 1])
    cache.fork("A", "B")
    for token in range(prompt, k.shape[0]):
        cache.append("AB"[(token - prompt) % 2], k[token : token + 1], v[token : token + 1])
    results = [cache.attend(name, q[i : i + 1], softmax_scale) for i, name in enumerate("AB")]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
