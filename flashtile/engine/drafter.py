"""Speculative decoding with a draft model, which drafts tokens on the device at the start of a step.

The draft model has its own KV cache with the same block numbers, so that sharing, copies and swapping apply
to both caches. The draft model's cache may lack the last two tokens of an answer. The first pass computes a
sequence's last two tokens; each further pass computes one drafted token. The last token of a prompt is in the
cache already, and its block may be shared, so the first pass does not write it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.engine.device import MAX_GRAPH_BATCH, Capture, Transfer, graph_batch
from flashtile.engine.model import Model, StepInput
from flashtile.engine.sampler import candidates, read_parameters
from flashtile.engine.scheduler import Entry


class Drafter:
    """Drafts tokens for sequences.

    Args:
        model, k_cache, v_cache: the draft model, and its KV cache. Padding sequences of a batch write to the
            last block.
        block_table: (max_sequences + 1, max_blocks) of all sequences. The last row is for padding sequences,
            and its entries are the number of the last block.
        known: (max_sequences + 1, 1 + drafts) int32. Column 0 holds each sequence's last token; :meth:`draft`
            writes the other columns.
        parents: the tree of drafts, a result of :func:`flashtile.engine.speculation.comb`.
    """

    def __init__(
        self, model: Model, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, known: Tensor,
        parents: tuple[int, ...],
    ):  # fmt: skip
        self.model, self.k_cache, self.v_cache = model, k_cache, v_cache
        self.block_table, self.known = block_table, known
        self.depth = max(parents) + 1
        self.width = len(parents) // self.depth
        device, rows = block_table.device, len(block_table)
        self.spare_row = rows - 1
        batch = graph_batch(min(rows, MAX_GRAPH_BATCH))
        self._transfer = Transfer(6 * max(batch, rows), device)
        # A window of one token sees no earlier key. The block of that key may already be released.
        self._sees_earlier_keys = any(model.config.windows)
        self._draw_of = functools.lru_cache(1)(functools.partial(read_parameters, device))
        self._logits = model.embedding.new_zeros(max(batch, rows), model.config.vocab_size)
        self.graphs: dict[tuple[int, bool], Callable[[], None]] = {}

    def follow(self, step: StepInput) -> None:
        """Write this model's keys and values for a step of the target model."""
        self.model.hidden(step, self.k_cache, self.v_cache)

    def draft(self, entries: Sequence[Entry], capture: Capture | None) -> None:
        """Draft tokens for these sequences and write them to ``known``.

        Args:
            entries: the sequences, with their rows of the block table.
            capture: makes CUDA graphs of the passes; None to run them directly.
        """
        sequences = [entry.sequence for entry in entries]
        batch = padded = len(entries)
        if batch > MAX_GRAPH_BATCH:
            capture = None
        if capture is not None:
            padded = graph_batch(batch)
        numbers = [
            (one.tokens[-2], one.tokens[-1], len(one.tokens) - 1, entry.row, max(one.parents) + 1,
             int(self._sees_earlier_keys and len(one.tokens) - 2 >= one.request.num_prompt))
            for entry, one in zip(entries, sequences, strict=True)
        ]  # fmt: skip
        numbers += [(0, 0, -1, self.spare_row, 0, 0)] * (padded - batch)
        # After each pass, the last token, its position, and the number of drafts that are still to be made
        # are updated in the buffer.
        _, tokens, positions_of_last, rows, remaining, _ = self._transfer(list(zip(*numbers, strict=True)))
        choice = self._draw_of(tuple(sequences)).choice
        guesses = []
        for place in range(self.depth):
            key = padded, place == 0
            if capture is None:
                self._pass(*key)
            else:
                if key not in self.graphs:
                    self.graphs[key] = capture(functools.partial(self._pass, *key))
                self.graphs[key]()
            found = candidates(self._logits[:batch], choice, positions_of_last[:batch] + 1, self.width)
            guesses.append(found)
            tokens[:batch] = found[:, 0]
            positions_of_last += 1
            remaining -= 1
        trunk = torch.stack([found[:, 0] for found in guesses], 1)
        siblings = torch.cat([found[:, 1:] for found in guesses], 1)
        self.known[:, 1:].index_copy_(0, rows[:batch].long(), torch.cat([trunk, siblings], 1).int())

    def _pass(self, batch: int, first: bool) -> None:
        """Compute the logits after each sequence's last token.

        The first pass computes the last two tokens of each sequence, because the cache of the draft model may
        lack both. A later pass computes only the last token.
        """
        state = self._transfer.numbers[: 6 * batch].view(6, batch)
        before, tokens, positions_of_last, rows, remaining, lacks_before = state
        # A sequence that has all its drafts may have no block for further tokens. Do not write keys and
        # values for it.
        continues, offsets = remaining > 0, None
        table = self.block_table.index_select(0, torch.where(continues, rows, self.spare_row))
        lengths = torch.where(continues, positions_of_last, 1) - int(first)
        owners, positions, writes = torch.arange(batch, device=tokens.device), lengths, continues
        if first:
            tokens = torch.stack([before, tokens], 1).view(-1)
            offsets = torch.arange(0, 2 * batch + 1, 2, dtype=torch.int32, device=tokens.device)
            owners, positions = owners.repeat_interleave(2), torch.stack([lengths, lengths + 1], 1).view(-1)
            writes = torch.stack([continues & (lacks_before > 0), continues], 1).view(-1)
        size = self.k_cache.shape[2]
        slots = table[owners, positions.long() // size].long() * size + positions % size
        slots = torch.where(writes, slots, -1)
        step = StepInput(tokens, lengths, table, offsets, 1 + int(first), positions, slots)
        hidden = self.model.hidden(step, self.k_cache, self.v_cache)
        self._logits[:batch] = self.model.logits(hidden[1::2] if first else hidden)
