"""Changes of logits that a request asks for: allowed tokens, penalties, biases and forbidden ends.

They concern a few of a row's logits, so the device keeps a list of tokens for each sequence: those of its prompt
and answer if it has penalties, and those that its parameters name. A step sends only the entries that have
changed, mostly one for each sequence, and computes the changed logits of all sequences together.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence as Listing
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.engine.device import on_device
from flashtile.engine.request import Sequence

IN_PROMPT, ALLOWED, END, COUNT = 1, 2, 4, 8
"""Flags of an entry, and the unit of the number of times that the answer contains its token."""
MAX_ADJUSTED = 8192
"""Largest number of changed logits of a row that the sampling kernel lists. Half of its list is left for others."""
NOTHING = -(2**31)
"""Stands for no unread token."""


class Entries:
    """The entries of one sequence, which the device has in row ``row`` of a table.

    Attributes:
        owner: (block sequence, row) when the entries were sent. With another owner they must be sent again.
        places: place of each token in the row.
        values: (token, flags and count, bits of the float32 bias) of each place.
        num_read: number of the sequence's tokens that are counted.
    """

    def __init__(self, sequence: Sequence, owner: tuple[int | None, int]):
        params, self.owner = sequence.request.params, owner
        self.places: dict[int, int] = {}
        self.values: list[list[int]] = []
        prompt = sequence.request.prompt_token_ids if params.penalises else ()
        self.num_read = sequence.request.num_prompt
        for flag, tokens in (
            (IN_PROMPT, set(prompt)), (ALLOWED, params.allowed_token_ids or ()),
            (END, sequence.request.ends if params.min_tokens else ()), (0, params.logit_bias or ()),
        ):  # fmt: skip
            for token in tokens:
                self.values[self.place(token)][1] |= flag
        for token, bias in (params.logit_bias or {}).items():
            (self.values[self.place(token)][2],) = struct.unpack("i", struct.pack("f", bias))

    def place(self, token: int) -> int:
        """Return the place of a token, a new one if it has none."""
        place = self.places.get(token)
        if place is None:
            place = self.places[token] = len(self.values)
            self.values.append([token, 0, 0])
        return place

    def count(self, sequence: Sequence) -> set[int]:
        """Count the sequence's new tokens and return their places."""
        changed = set()
        if sequence.request.params.penalises:
            for token in itertools.islice(sequence.tokens, self.num_read, None):
                place = self.place(token)
                self.values[place][1] += COUNT
                changed.add(place)
            self.num_read = len(sequence.tokens)
        return changed


class Adjusted(NamedTuple):
    """Changed logits of some rows.

    Attributes:
        rows: (count,) int64 indices of the rows of logits.
        tokens: (count, columns) int64. A token may occur twice, with the same logit.
        logits: (count, columns) float32.
        original: the logits before the change, of the dtype of the model.
        first: whether a column is the first one with its token.
        restricted: (count,) bool, whether all tokens that are not listed are excluded.
    """

    rows: Tensor
    tokens: Tensor
    logits: Tensor
    original: Tensor
    first: Tensor
    restricted: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Return a copy of logits (rows, vocab_size), float32, with the changes."""
        logits = logits.to(torch.float32, copy=True)
        changed = logits.index_select(0, self.rows).masked_fill_(self.restricted.unsqueeze(1), -torch.inf)
        return logits.index_copy_(0, self.rows, changed.scatter_(1, self.tokens, self.logits))

    def chosen(self, best: Tensor, tokens: Tensor) -> Tensor:
        """Return ``best`` (rows,), the logits of the chosen tokens, after the changes."""
        tokens = tokens.index_select(0, self.rows).unsqueeze(1)
        same = self.tokens == tokens
        plain = best.float().index_select(0, self.rows).masked_fill_(self.restricted, -torch.inf)
        changed = self.logits.masked_fill(~same, -torch.inf).amax(1)
        return best.float().index_copy_(0, self.rows, torch.where(same.any(1), changed, plain))

    def hide(self, logits: Tensor) -> None:
        """Overwrite the listed logits with -inf, in place."""
        logits[self.rows.unsqueeze(1), self.tokens] = torch.full_like(self.original, -torch.inf)

    def restore(self, logits: Tensor) -> None:
        """Undo :meth:`hide`."""
        logits[self.rows.unsqueeze(1), self.tokens] = self.original


class Adjuster:
    """The table of entries on the device, with a row for each sequence in the block table."""

    def __init__(self, device: torch.device, rows: int):
        self.table = torch.zeros(rows, 0, 3, dtype=torch.int32, device=device)

    def __call__(
        self, logits: Tensor, samples: Listing[tuple[int, Sequence, int, Listing[int]]], known: Tensor
    ) -> Adjusted:
        """Return the changes of rows of logits (rows, vocab_size).

        Args:
            logits: the logits.
            samples: (row of logits, sequence, row of the block table, tokens of the answer that the sequence does
                not have yet) of each changed row. A token is a guess, or ``~column`` of ``known``.
            known: (rows of the block table, columns) int32, the last tokens of sequences and their guesses.
        """
        self._send({sequence: row for _, sequence, row, _ in samples})
        width = max(len(unread) for *_, unread in samples)
        numbers, floats, most = [], [], 0
        for i, sequence, row, unread in samples:
            params, entries = sequence.request.params, sequence.entries
            assert entries is not None
            most = max(most, len(entries.values))
            bans = sequence.num_outputs - 1 < params.min_tokens
            restricted = params.allowed_token_ids is not None
            unread = [*unread, *[NOTHING] * (width - len(unread))]
            numbers.append([i, row, len(entries.values), bans, restricted, *unread])
            floats.append([params.repetition_penalty, params.presence_penalty, params.frequency_penalty])
        sent = on_device(numbers, torch.int64, logits.device)
        rows, places, counts, bans, restricts = sent[:, :5].unbind(1)
        entries = self.table[:, :most].index_select(0, places)
        # Columns beyond the row's entries repeat the first one.
        beyond = torch.arange(most, device=logits.device) >= counts.unsqueeze(1)
        entries, first = torch.where(beyond.unsqueeze(2), entries[:, :1], entries), ~beyond
        for codes in sent[:, 5:].split(1, 1) if width else ():
            token = known.index_select(0, places).gather(1, (~codes).clamp(0, known.shape[1] - 1))
            token = torch.where(codes >= 0, codes, token.long()).masked_fill(codes == NOTHING, -1)
            entries, first = _with_token(entries, first, token)
        penalties = on_device(floats, torch.float32, logits.device).unsqueeze(2).unbind(1)
        tokens, flags, biases = entries[..., 0].long(), entries[..., 1], entries[..., 2].contiguous()
        original = logits[rows.unsqueeze(1), tokens]
        changed = _changed(original.float(), flags, biases.view(torch.float32), *penalties)
        excluded = (restricts.unsqueeze(1) > 0) & (flags & ALLOWED == 0)
        excluded |= (bans.unsqueeze(1) > 0) & (flags & END > 0)
        changed = changed.masked_fill_(excluded, -torch.inf)
        return Adjusted(rows, tokens, changed, original, first, restricts > 0)

    def _send(self, rows: dict[Sequence, int]) -> None:
        """Bring the table up to date for sequences with these rows."""
        changes: list[tuple[int, Entries, Iterable[int]]] = []
        for sequence, row in rows.items():
            owner, entries = (sequence.block_sequence, row), sequence.entries
            if entries is None or entries.owner != owner:
                entries = sequence.entries = Entries(sequence, owner)
                entries.count(sequence)
                changes.append((row, entries, range(len(entries.values))))
            else:
                changes.append((row, entries, entries.count(sequence)))
        room = max(len(entries.values) for _, entries, _ in changes)
        if room > self.table.shape[1]:
            more = (1 << room.bit_length()) - self.table.shape[1]
            self.table = torch.nn.functional.pad(self.table, (0, 0, 0, more))
        room = self.table.shape[1]
        numbers = [
            [row * room + place, *entries.values[place]] for row, entries, places in changes for place in places
        ]
        if numbers:
            sent = on_device(numbers, torch.int32, self.table.device)
            self.table.view(-1, 3).index_copy_(0, sent[:, 0].long(), sent[:, 1:])


def _with_token(entries: Tensor, first: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Count one more token (rows, 1) of each answer, -1 for none. Append a column for tokens that have none.

    Elsewhere the column repeats the token's column, or the first one.
    """
    same = entries[..., 0] == token
    entries[..., 1] += COUNT * same
    same &= first
    has_column = same.any(1, keepdim=True)
    copied = torch.where(has_column | (token < 0), same.long().argmax(1, keepdim=True), 0)
    new = torch.stack([token, torch.full_like(token, COUNT), torch.zeros_like(token)], 2).int()
    column = entries.gather(1, copied.unsqueeze(2).expand(-1, -1, 3))
    is_new = ~has_column & (token >= 0)
    column = torch.where(is_new.unsqueeze(2), new, column)
    return torch.cat([entries, column], 1), torch.cat([first, is_new], 1)


def _changed(
    logits: Tensor, flags: Tensor, biases: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Return logits after penalties and biases, as vLLM computes them."""
    counts = flags // COUNT
    seen = (flags & IN_PROMPT > 0) | (counts > 0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - presence * (counts > 0) - frequency * counts + biases
