"""Changes of logits by the parameters of a request: allowed tokens, penalties, biases and forbidden ends.

They concern a few of a row's logits, so the device keeps a list of tokens for each sequence: those of its
prompt and answer if it has penalties, and those that its parameters name. A step sends only the entries that
have changed, mostly one for each sequence, and computes the changed logits of all sequences together.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.engine.device import on_device
from flashtile.engine.request import Sequence

IN_PROMPT, ALLOWED, END, COUNT = 1, 2, 4, 8
"""Flags of an entry, and the unit of the number of times that the answer contains its token."""
MAX_ADJUSTED = 8192
"""Largest number of changed logits of a row that the sampling kernel lists, half of its list."""
NOTHING = -(2**31)
"""Stands for no unread token."""


def bans_ends(sequence: Sequence) -> bool:
    """Whether the next token must not end the answer."""
    return sequence.num_outputs - 1 < sequence.request.params.min_tokens and bool(sequence.request.ends)


def needs_adjusting(sequence: Sequence) -> bool:
    """Whether some of the sequence's logits are changed before the draw."""
    params = sequence.request.params
    return bool(params.penalises or params.logit_bias or params.allowed_token_ids) or bans_ends(sequence)


class Entries:
    """The entries of one sequence, which the device has in row ``row`` of a table.

    Attributes:
        owner: (block sequence, row) when the entries were sent. With another owner they must be sent again.
        places: place of each token in the row.
        values: of each place, the token, its flags and count, and the bits of its float32 bias.
        num_read: number of the sequence's tokens that are counted.
    """

    def __init__(self, sequence: Sequence, owner: tuple[int | None, int]):
        params, self.owner = sequence.request.params, owner
        prompt = list(dict.fromkeys(sequence.request.prompt_token_ids)) if params.penalises else []
        self.places = {token: place for place, token in enumerate(prompt)}
        self.values = array("i", bytes(12 * len(prompt)))
        self.values[0::3], self.values[1::3] = array("i", prompt), array("i", [IN_PROMPT]) * len(prompt)
        self.num_read = sequence.request.num_prompt
        ends = sequence.request.ends if params.min_tokens else ()
        for flag, tokens in ((ALLOWED, params.allowed_token_ids or ()), (END, ends)):
            for token in tokens:
                self.values[3 * self.place(token) + 1] |= flag
        for token, bias in (params.logit_bias or {}).items():
            (self.values[3 * self.place(token) + 2],) = struct.unpack("i", struct.pack("f", bias))

    def __len__(self) -> int:
        return len(self.places)

    def place(self, token: int) -> int:
        """Return the place of a token, a new one if it has none."""
        place = self.places.setdefault(token, len(self.places))
        if 3 * place == len(self.values):
            self.values.extend((token, 0, 0))
        return place

    def count(self, sequence: Sequence) -> set[int]:
        """Count the sequence's new tokens and return their places."""
        changed = set()
        if sequence.request.params.penalises:
            for token in sequence.tokens[self.num_read :]:
                place = self.place(token)
                self.values[3 * place + 1] += COUNT
                changed.add(place)
            self.num_read = len(sequence.tokens)
        return changed


class Adjusted(NamedTuple):
    """Changes of the logits of a step, on the device.

    Attributes:
        lists: (rows,) int32, index of the changes of each row of logits, -1 for none.
        numbers: (count, 5 + width) int32 of each row with changes: row of logits, row of the block table,
            number of entries, whether ends are excluded, whether tokens that are not allowed are excluded,
            and the unread tokens, as :class:`Adjuster` takes them.
        penalties: (count, 3) float32: repetition, presence and frequency penalty.
        table: (rows of the block table, room, 3) int32, the entries of each sequence.
        known: (rows of the block table, columns) int32, that of :class:`Adjuster`.
        most: largest number of entries of a row, and of its unread tokens.
    """

    lists: Tensor
    numbers: Tensor
    penalties: Tensor
    table: Tensor
    known: Tensor
    most: int

    def apply(self, logits: Tensor) -> Tensor:
        """Return a copy of logits (rows, vocab_size), float32, with the changes."""
        rows, places, counts, bans, restricts = self.numbers[:, :5].long().unbind(1)
        entries = self.table[:, : self.most].index_select(0, places)
        # Columns beyond the row's entries repeat the first one.
        beyond = torch.arange(entries.shape[1], device=logits.device) >= counts.unsqueeze(1)
        entries = torch.where(beyond.unsqueeze(2), entries[:, :1], entries)
        last = self.known.index_select(0, places)
        for codes in self.numbers[:, 5:].long().unsqueeze(2).unbind(1):
            token = last.gather(1, (~codes).clamp(0, last.shape[1] - 1)).long()
            token = torch.where(codes >= 0, codes, token).masked_fill(codes == NOTHING, -1)
            entries = _with_token(entries, token)
        tokens, flags, biases = entries[..., 0].long(), entries[..., 1], entries[..., 2].contiguous()
        counts, logits = flags // COUNT, logits.to(torch.float32, copy=True)
        # As vLLM computes them.
        repetition, presence, frequency = self.penalties.unsqueeze(2).unbind(1)
        changed = logits[rows.unsqueeze(1), tokens]
        repeated = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where((flags & IN_PROMPT > 0) | (counts > 0), repeated, changed)
        changed = changed - presence * (counts > 0) - frequency * counts + biases.view(torch.float32)
        restricts = restricts.unsqueeze(1) > 0
        excluded = restricts & (flags & ALLOWED == 0) | (bans.unsqueeze(1) > 0) & (flags & END > 0)
        changed = changed.masked_fill_(excluded, -torch.inf)
        own = logits.index_select(0, rows).masked_fill_(restricts, -torch.inf)
        return logits.index_copy_(0, rows, own.scatter_(1, tokens, changed))


class Adjuster:
    """The table of entries on the device, with a row for each sequence in the block table.

    ``known`` (rows of the block table, columns) int32 are the last tokens of sequences and their guesses.
    """

    def __init__(self, known: Tensor):
        self.known = known
        self.table = known.new_zeros(len(known), 0, 3)

    def __call__(self, num_rows: int, samples: Listing[tuple[int, Sequence, int, Listing[int]]]) -> Adjusted:
        """Return the changes of ``num_rows`` rows of logits.

        ``samples`` has (row of logits, sequence, row of the block table, tokens of the answer that the
        sequence does not have yet) of each changed row. A token is a guess, or ``~column`` of ``known``.
        """
        self._send({sequence: row for _, sequence, row, _ in samples})
        width = max(len(unread) for *_, unread in samples)
        lists, numbers, floats, most = array("i", [-1]) * num_rows, array("i"), [], 0
        for index, (i, sequence, row, unread) in enumerate(samples):
            params, count = sequence.request.params, len(sequence.entries)
            lists[i], most = index, max(most, count + len(unread))
            restricts = params.allowed_token_ids is not None
            numbers.extend((i, row, count, bans_ends(sequence), restricts, *unread))
            numbers.extend([NOTHING] * (width - len(unread)))
            floats += [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        device = self.table.device
        sent = on_device(lists + numbers, torch.int32, device)
        penalties = on_device(floats, torch.float32, device).view(-1, 3)
        return Adjusted(
            sent[:num_rows], sent[num_rows:].view(-1, 5 + width), penalties, self.table, self.known, most
        )

    def _send(self, rows: dict[Sequence, int]) -> None:
        """Bring the table up to date for sequences with these rows."""
        changes: list[tuple[int, Entries, Iterable[int]]] = []
        for sequence, row in rows.items():
            owner, entries = (sequence.block_sequence, row), sequence.entries
            if entries is None or entries.owner != owner:
                entries = sequence.entries = Entries(sequence, owner)
                entries.count(sequence)
                changes.append((row, entries, range(len(entries))))
            else:
                changes.append((row, entries, entries.count(sequence)))
        room = max(len(entries) for _, entries, _ in changes)
        if room > self.table.shape[1]:
            more = (1 << room.bit_length()) - self.table.shape[1]
            self.table = torch.nn.functional.pad(self.table, (0, 0, 0, more))
        room, numbers = self.table.shape[1], array("i")
        for row, entries, places in changes:
            for place in places:
                numbers.append(row * room + place)
                numbers.extend(entries.values[3 * place : 3 * place + 3])
        if numbers:
            sent = on_device(numbers, torch.int32, self.table.device).view(-1, 4)
            self.table.view(-1, 3).index_copy_(0, sent[:, 0].long(), sent[:, 1:])


def _with_token(entries: Tensor, token: Tensor) -> Tensor:
    """Count one more token (rows, 1) of each answer, -1 for none. Append a column for tokens that have none.

    Elsewhere the column repeats the token's column, or the first one.
    """
    same = entries[..., 0] == token
    entries[..., 1] += COUNT * same
    new = torch.stack([token, torch.full_like(token, COUNT), torch.zeros_like(token)], 2).int()
    column = entries.gather(1, same.long().argmax(1, keepdim=True).unsqueeze(2).expand(-1, -1, 3))
    is_new = ~same.any(1, keepdim=True) & (token >= 0)
    return torch.cat([entries, torch.where(is_new.unsqueeze(2), new, column)], 1)
