"""Runs steps on the device: memory for keys and values, one transfer a step, CUDA graphs, the draw.

What the host says of a step goes to the device in one copy of int32 numbers. The chosen tokens stay there,
one place a row of the block table, so that the next step can be launched before the host has seen them. Steps
of single tokens, and of tokens with guesses behind them, are captured in CUDA graphs, one for each padded
batch size, when they are first needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.api.decode import copy_blocks
from flashtile.engine.drafter import Drafter
from flashtile.engine.draws import Draws, is_special, shape
from flashtile.engine.graphs import MAX_GRAPH_BATCH, Capture, graph_batch
from flashtile.engine.model import Model, StepInput
from flashtile.engine.parallel import ALONE, Ranks
from flashtile.engine.request import Sequence
from flashtile.engine.sampler import choose, log_probabilities
from flashtile.engine.sampling_params import BeamSearchParams
from flashtile.engine.scheduler import COPY, SWAP_OUT, Entry, Schedule
from flashtile.engine.speculation import UNKNOWN, depths, visible
from flashtile.engine.transfer import RING, Transfer, on_device
from flashtile.kv_cache import BlockManager

LOGITS_ROWS = 512
"""Rows of logits that exist at a time where every token of a prompt needs them."""
MAX_CHANGES = 2**18
"""Entries of the block table that go to the device with a step's other numbers."""
NOT_FINITE = "the model's logits are NaN or infinite, or no token is left to choose"


@dataclass
class TokenScores:
    """Log-probabilities of one row: of its token, the token's rank, and the likeliest tokens with theirs."""

    logprob: float
    rank: int
    best: list[tuple[int, float]]


@dataclass
class InFlight:
    """A launched step, its results on their way to the host.

    Attributes:
        schedule: what was launched.
        samples: the sequences that got a token, in the order of ``tokens``.
        best: the logits of these tokens: NaN and infinity always win.
        failed: by sample, why it has no token: an error of a function of its request's, or its logits.
        drafted: sequences, and the guesses of a draft model for them.
    """

    schedule: Schedule
    samples: list[Sequence]
    tokens: Tensor
    best: Tensor = field(default_factory=lambda: torch.empty(0))
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    prompt_scores: list[tuple[Sequence, int, tuple[Tensor, ...]]] = field(default_factory=list)
    drafted: tuple[list[Sequence], Tensor] | None = None
    event: Any = None

    def wait(self) -> list[int]:
        """The tokens, when they have come; the sequences then know what was guessed for them."""
        if self.event is not None:
            self.event.synchronize()
        for i in (~self.best.isfinite()).nonzero().flatten().tolist():
            self.failed.setdefault(i, NOT_FINITE)
        if self.drafted is not None:
            sequences, guesses = self.drafted
            for sequence, found in zip(sequences, guesses.tolist(), strict=False):
                sequence.guesses = found[: len(sequence.guesses)]
        return self.tokens.tolist()

    def scores_of(self, i: int) -> TokenScores | None:
        """Of sample i, where they were asked for."""
        found = self.scores.get(i)
        return None if found is None else _scores(found)[0]

    def scores_of_prompts(self) -> list[tuple[Sequence, int, list[TokenScores]]]:
        """(sequence, position of the first, scores) of chunks of prompts."""
        return [(sequence, first, _scores(found)) for sequence, first, found in self.prompt_scores]


def _scores(found: tuple[Tensor, ...]) -> list[TokenScores]:
    chosen, ranks, values, tokens = (tensor.tolist() for tensor in found)
    return [
        TokenScores(logprob, rank, list(zip(row_tokens, row_values, strict=True)))
        for logprob, rank, row_values, row_tokens in zip(chosen, ranks, values, tokens, strict=True)
    ]


class Form(NamedTuple):
    """The sizes of a step, padded where a CUDA graph computes it, and what is sent for it.

    Attributes:
        batch, tokens, width: sequences, new tokens in all, and of one sequence at most.
        places: each token's position and slot are sent, for some tokens of every sequence.
        tree: so is what each of them sees of the newest tokens.
        shadow: the draft model computes the step, too: some tokens of it have no guesses behind them.
    """

    batch: int
    tokens: int
    width: int
    places: bool = False
    tree: bool = False
    shadow: bool = False


@dataclass
class Memory:
    """Keys and values of a model, (num_layers, num_blocks, block_size, kv_heads, head_dim), on the device
    and, of sequences that are swapped out, on the host."""

    k: Tensor
    v: Tensor
    host: list[Tensor]

    @classmethod
    def of(cls, model: Model, manager: BlockManager, dtype: torch.dtype) -> Memory:
        """For the blocks of a manager, and one more: what pads a batch writes there."""
        config, device = model.config, model.embedding.device
        blocks, host_blocks = manager.pool.num_blocks + 1, manager.host_pool.num_blocks
        block = (manager.block_size, model.kv_heads, config.head_dim)
        k, v = (torch.zeros(config.num_layers, blocks, *block, dtype=dtype, device=device) for _ in "kv")
        pinned = device.type == "cuda" and host_blocks > 0
        host = (config.num_layers, host_blocks, *block)
        return cls(k, v, [torch.zeros(host, dtype=dtype, pin_memory=pinned) for _ in "kv"])


class Runner:
    """The model with its memory.

    Args:
        model: the layers, on their device.
        manager: whose blocks the memory is for.
        cache_dtype: of keys and values.
        max_num_batched_tokens: the most that a step computes.
        capture: use CUDA graphs where there is a GPU.
        parents: of the guesses that a sequence has at most (:mod:`flashtile.engine.speculation`).
        draft: a model that makes these guesses.
        ranks: the processes that compute the model together.
    """

    def __init__(
        self,
        model: Model,
        manager: BlockManager,
        cache_dtype: torch.dtype,
        max_num_batched_tokens: int,
        capture: bool = True,
        parents: tuple[int, ...] = (),
        draft: Model | None = None,
        ranks: Ranks = ALONE,
    ):
        config = model.config
        self.model, self.manager, self.ranks = model, manager, ranks
        self.device = model.embedding.device
        self.memory = Memory.of(model, manager, cache_dtype)
        rows = manager.table.max_sequences
        on_gpu = self.device.type == "cuda"
        self.spare_row = rows
        self.block_table = torch.zeros(
            rows + 1, manager.table.max_blocks, dtype=torch.int32, device=self.device
        )
        self.block_table[rows] = manager.pool.num_blocks
        self.branches = parents != tuple(range(len(parents)))
        # Behind a right sibling two tokens are to be computed before the guesses.
        self.verified = len(parents) + 1 + self.branches if parents else 1
        self.known = torch.zeros(rows + 1, 1 + len(parents), dtype=torch.int32, device=self.device)
        # The experts in use are known on the host only.
        self.capture = Capture(self.device) if capture and on_gpu and not config.num_experts else None
        self.graphs: dict[Form, Callable[[], None]] = {}
        # Room for the largest step, whose every row of the block table is new if the table is small. Graphs
        # read from this place.
        padded = max_num_batched_tokens + MAX_GRAPH_BATCH * (1 + self.verified)
        samples = max_num_batched_tokens + rows
        changes = min(self.block_table.numel(), MAX_CHANGES)
        numbers = 5 * padded + 3 * samples + 3 * (rows + MAX_GRAPH_BATCH) + 2 * changes
        self._transfer = Transfer(numbers, self.device)
        results = samples + rows * len(parents)
        self._result = [torch.empty(results, dtype=torch.int64, pin_memory=on_gpu) for _ in range(RING)]
        batch = graph_batch(min(rows * self.verified, MAX_GRAPH_BATCH)) if self.capture is not None else 0
        # What all graphs write; each one of its own would take gigabytes.
        self._logits = model.embedding.new_zeros(batch, config.vocab_size // ranks.world)
        # At the end of a process, before it leaves its group: NCCL waits for graphs that it is in.
        weakref.finalize(self, self.graphs.clear)
        self._turn = 0
        self._draws = Draws(self.device)
        self.drafter: Drafter | None = None
        if draft is not None:
            memory = Memory.of(draft, manager, draft.embedding.dtype)
            self.drafter = Drafter(draft, memory.k, memory.v, self.block_table, self.known, parents)
            self.draft_memory = memory

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> InFlight:
        """Start a step. On a GPU it returns before the step is done."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._launch(schedule)
        return self._launch(schedule)

    def _launch(self, schedule: Schedule) -> InFlight:
        self._turn = (self._turn + 1) % RING
        for what, pairs in schedule.moves:
            self._move(what, pairs)
        if not schedule.entries:
            return InFlight(schedule, [], torch.empty(0, dtype=torch.int64))
        samples = [sample for entry in schedule.entries for sample in entry.samples]
        form, captured = self._form(schedule.entries)
        step, positions = self._send(schedule, samples, form)
        guessed = [entry for entry in schedule.entries if entry.sequence.guesses[:1] == [UNKNOWN]]
        if guessed:
            assert self.drafter is not None
            self.drafter.draft(guessed, self.capture)
            self.known.copy_(self.ranks.agree(self.known))
        in_flight = InFlight(schedule, [], torch.empty(0, dtype=torch.int64))
        if captured:
            logits = self._replay(form)
            if not len(samples) == len(schedule.entries) == form.tokens:
                logits = logits.index_select(0, positions.logits_rows)
            self._choose(in_flight, samples, logits, positions)
        else:
            hidden = self._compute(step, form)
            if samples:
                logits = self.model.logits(hidden.index_select(0, positions.logits_rows))
                self._choose(in_flight, samples, logits, positions)
            self._score_prompts(schedule, hidden, in_flight)
        if guessed:
            rows = on_device([entry.row for entry in guessed], torch.int64, self.device)
            in_flight.drafted = [entry.sequence for entry in guessed], self.known[:, 1:].index_select(0, rows)
        self._send_back(in_flight)
        return in_flight

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for the device, and give the graphs back."""
        self.synchronize()
        self.graphs.clear()

    def _form(self, entries: Listing[Entry]) -> tuple[Form, bool]:
        """The sizes of a step, and whether a CUDA graph computes it."""
        total, most = (f(entry.num_tokens for entry in entries) for f in (sum, max))
        # A token of each sequence, or also guesses behind it, of which all get a token.
        few = all(entry.samples and (entry.num_tokens == 1 or entry.sequence.guesses) for entry in entries)
        shadow = self.drafter is not None and not all(entry.sequence.guesses for entry in entries)
        places = few and most > 1
        tree = places and self.branches
        if few and self.capture is not None:
            batch, width = graph_batch(len(entries)), self.verified if places else 1
            if batch * width <= len(self._logits):
                return Form(batch, batch * width, width, places, tree, shadow), True
        return Form(len(entries), total, most, places, tree, shadow), False

    def _send(self, schedule: Schedule, samples: list[Sequence], form: Form) -> tuple[StepInput, Positions]:
        """The step's numbers to the device. In place of the block table stand its rows, and ``~place`` in
        ``known`` in place of a token that only the device knows."""
        entries, spare = schedule.entries, form.batch - len(schedule.entries)
        table, size = self.manager.table, self.manager.block_size
        # What pads the batch writes to the spare block, each to a place of its own.
        starts = [entry.start for entry in entries] + [i % size for i in range(spare)]
        rows = [entry.row for entry in entries] + [self.spare_row] * spare
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        masks: list[int] = []
        offsets, logits_rows, sample_positions = [0], [], []
        for entry in entries:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            place = entry.row * self.known.shape[1]
            if entry.num_tokens == 1 and not (sequence.guesses or form.places):  # most steps have only these
                known = entry.start < len(sequence.tokens)
                tokens.append(sequence.tokens[entry.start] if known else ~place)
                logits_rows += [len(tokens) - 1] * len(entry.samples)
                sample_positions += [end] * len(entry.samples)
                offsets.append(len(tokens))
                continue
            new = [*sequence.tokens[entry.start : end], *sequence.guesses][: entry.num_tokens]
            if len(new) < entry.num_tokens:  # the last one is on the device only
                new.append(~place)
            guesses = sequence.guesses
            if guesses[:1] == [UNKNOWN]:
                new[-len(guesses) :] = (~(place + 1 + i) for i in range(len(guesses)))
            tokens += new
            # A sequence and its forks draw from the last token's logits, one with guesses from each.
            last = len(guesses) if entry.samples else 0
            first = end - last  # of the guesses
            depth = depths(sequence.parents[:last]) if last else [0]
            if last and not form.places:
                sequence.parents = tuple(range(max(depth)))  # beside a chunk the guesses are a row
            times = 1 if last else len(entry.samples)
            logits_rows += [len(tokens) - 1 - last + i for i in range(1 + last)] * times
            sample_positions += [first + d for d in depth] * times
            offsets.append(len(tokens))
            if form.places:
                positions += range(entry.start, first - 1)
                positions += [first - 1 + d for d in depth]
                begin = entry.row * table.max_blocks
                slots += [
                    table.entries[begin + i // size] * size + i % size for i in range(entry.start, end)
                ]
            if form.tree:
                lead = first - 1 - entry.start
                below = (1 << lead) - 1
                seen = [(2 << i) - 1 for i in range(lead)]
                seen += [bits << lead | below for bits in visible(sequence.parents[:last])]
                masks += seen + [0] * (form.width - len(seen))
        if form.places:
            masks += [0] * (form.width * spare) if form.tree else []
            positions += [0] * (form.tokens - len(positions))
            slots += [-1] * (form.tokens - len(slots))
        offsets += [len(tokens)] * spare if form.places else []
        tokens += [0] * (form.tokens - len(tokens))
        sample_rows = [table.row(s.block_sequence) for s in samples]  # type: ignore[arg-type]
        changed, values = table.take_changes()
        if len(changed) > MAX_CHANGES:  # as when many sequences begin with the same long text
            self._change_table(changed.to(self.device), values.to(self.device))
            changed, values = changed[:0], values[:0]
        parts: list[list[int]] = [starts, rows, tokens]
        if form.width > 1:
            parts += [offsets, positions, slots, *_words(masks)]
        views = self._transfer([*parts, logits_rows, sample_rows, sample_positions], (changed, values))
        if len(changed):
            self._change_table(views[-2].long(), views[-1])
        return self._step(views, form), Positions(views[-5], views[-4].long(), views[-3])

    def _change_table(self, places: Tensor, blocks: Tensor) -> None:
        self.block_table.view(-1).index_copy_(0, places, blocks)

    def _step(self, views: list[Tensor], form: Form) -> StepInput:
        """The step that :meth:`_send` has sent."""
        starts, rows, tokens = views[:3]
        if form.width == 1:
            return StepInput(tokens, starts, rows, None, 1)
        offsets = views[3].clone()  # aligned, or kernels are compiled once more
        step = StepInput(tokens, starts, rows, offsets, form.width)
        if form.places:
            step = step._replace(positions=views[4].clone(), slots=views[5].long())
        if form.tree:
            bits = torch.arange(form.width, device=self.device)
            words = torch.where(bits < 32, views[6].unsqueeze(1), views[7].unsqueeze(1))
            seen = (words >> bits % 32) & 1
            step = step._replace(tree_mask=(seen != 0).view(form.batch, form.width, form.width))
        return step

    def _compute(self, step: StepInput, form: Form) -> Tensor:
        """(tokens, hidden_size) of the model; the draft model fills its memory, too, if it has to."""
        missing = step.tokens < 0
        known = self.known.view(-1).index_select(0, torch.where(missing, ~step.tokens, 0))
        step = step._replace(
            tokens=torch.where(missing, known, step.tokens),
            block_table=self.block_table.index_select(0, step.block_table),
        )
        if form.shadow:
            assert self.drafter is not None
            self.drafter.follow(step)
        return self.model.hidden(step, self.memory.k, self.memory.v)

    def _replay(self, form: Form) -> Tensor:
        """(form.tokens, vocab_size) logits of a step, by its CUDA graph."""
        if form not in self.graphs:
            assert self.capture is not None
            self.graphs[form] = self.capture(self._step_of(form))
        self.graphs[form]()
        return self.ranks.join(self._logits[: form.tokens])

    def _step_of(self, form: Form) -> Callable[[], None]:
        """A step that reads its numbers from where :meth:`_send` puts them."""
        sizes = [form.batch, form.batch, form.tokens]
        if form.width > 1:
            masks = form.batch * form.width * form.tree
            sizes += [form.batch + 1, form.tokens, form.tokens, masks, masks]
        views = list(self._transfer.numbers[: sum(sizes)].split(sizes))

        def run() -> None:
            hidden = self._compute(self._step(views, form), form)
            self._logits[: form.tokens] = self.model.own_logits(hidden)

        return run

    def _choose(
        self, in_flight: InFlight, samples: list[Sequence], logits: Tensor, positions: Positions
    ) -> None:
        """Choose a token for each sample and keep it on the device."""
        raw, draw = logits, self._draws.of(samples)
        shaped = [i for i in draw.shaped if is_special(samples[i])]
        if shaped:
            logits = logits.float().clone()
        for i in shaped:
            try:
                shape(logits[i], samples[i])
            except Exception as error:  # of a logits processor: the others go on
                in_flight.failed[i] = f"{type(error).__name__}: {error}"
        tokens = self.ranks.agree(choose(logits, draw.choice, positions.positions))
        self.known[:, 0].index_copy_(0, positions.rows, tokens.int())
        in_flight.samples, in_flight.tokens = samples, tokens
        in_flight.best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        for i, count in draw.scored:
            scored = raw[i : i + 1].float()
            params = samples[i].request.params
            if isinstance(params, BeamSearchParams) and params.temperature:
                scored = scored / params.temperature
            count = scored.shape[1] if count < 0 else count
            in_flight.scores[i] = log_probabilities(scored, tokens[i : i + 1], count)

    def _send_back(self, in_flight: InFlight) -> None:
        if self.device.type == "cpu":
            return
        tokens, place = in_flight.tokens, self._result[self._turn]
        in_flight.tokens = place[: len(tokens)].copy_(tokens, non_blocking=True)
        if in_flight.drafted is not None:
            sequences, guesses = in_flight.drafted
            place = place[len(tokens) :][: guesses.numel()].view(guesses.shape)
            in_flight.drafted = sequences, place.copy_(guesses, non_blocking=True)
        (in_flight.best,) = _to_host((in_flight.best,))
        in_flight.scores = {i: _to_host(found) for i, found in in_flight.scores.items()}
        in_flight.prompt_scores = [
            (sequence, first, _to_host(found)) for sequence, first, found in in_flight.prompt_scores
        ]
        in_flight.event = torch.cuda.Event()
        in_flight.event.record()

    def _score_prompts(self, schedule: Schedule, hidden: Tensor, in_flight: InFlight) -> None:
        """Log-probabilities of the prompts' own tokens, where they were asked for, in pieces."""
        at = 0
        for entry in schedule.entries:
            first, at = at, at + entry.num_tokens
            request, sequence = entry.sequence.request, entry.sequence
            params = request.params
            if isinstance(params, BeamSearchParams) or params.prompt_logprobs is None:
                continue
            done = len(request.prompt_logprobs or ())
            begin = max(entry.start + 1, done)
            end = min(entry.start + entry.num_tokens + 1, request.num_prompt)
            for piece in range(begin, end, LOGITS_ROWS):
                targets = sequence.tokens[piece : min(end, piece + LOGITS_ROWS)]
                rows = hidden[first + piece - 1 - entry.start :][: len(targets)]
                logits = self.model.logits(rows)
                count = params.prompt_logprobs if params.prompt_logprobs >= 0 else logits.shape[1]
                wanted = on_device(targets, torch.int64, self.device)
                found = log_probabilities(logits, wanted, count)
                in_flight.prompt_scores.append((sequence, piece, found))

    def _move(self, what: str, pairs: Listing[tuple[int, int]]) -> None:
        """Copy blocks, in the order in which they were said."""
        memories = [self.memory] + ([] if self.drafter is None else [self.draft_memory])
        for memory in memories:
            if what == COPY:
                copy_blocks(memory.k, memory.v, on_device(list(pairs), torch.int64, self.device))
                continue
            sources, targets = zip(*pairs, strict=True)
            for cache, host in zip((memory.k, memory.v), memory.host, strict=True):
                old, new = (cache, host) if what == SWAP_OUT else (host, cache)
                here = on_device(sources, torch.int64, old.device)
                there = on_device(targets, torch.int64, new.device)
                for layer in range(len(old)):
                    source, target = (_bytes(one[layer]) for one in (old, new))
                    target.index_copy_(0, there, source.index_select(0, here).to(target.device))


@dataclass(frozen=True)
class Positions:
    """Of each sample, (samples,) on the device: its row of the logits, of the block table, and the place of
    its new token in the sequence."""

    logits_rows: Tensor
    rows: Tensor
    positions: Tensor


def _to_host(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)


def _words(masks: list[int]) -> tuple[list[int], list[int]]:
    """The low and the high 32 bits of 64, as signed numbers."""
    low, high = ([bits >> shift & 0xFFFFFFFF for bits in masks] for shift in (0, 32))
    return tuple([word - (word >> 31 << 32) for word in words] for words in (low, high))  # type: ignore[return-value]


def _bytes(memory: Tensor) -> Tensor:
    """The same memory as numbers that can be indexed on every device: FP8 has few operations."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
