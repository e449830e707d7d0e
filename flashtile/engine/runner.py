"""Runs steps on the device: memory for keys and values, one transfer a step, CUDA graphs, the draw.

What the host says of a step goes to the device in one copy of int32 numbers, from pinned memory. The chosen
tokens stay there, one place a row of the block table, so that the next step can be launched before the host
has seen them. Steps of single tokens are captured in CUDA graphs, one for each padded batch size, when they
are first needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashtile.decode.functional import copy_blocks
from flashtile.engine.model import Model, StepInput
from flashtile.engine.request import Sequence
from flashtile.engine.sampler import Choice, choose, log_probabilities, penalise, stream_seed
from flashtile.engine.sampling_params import BeamSearchParams, SamplingParams
from flashtile.engine.scheduler import COPY, SWAP_OUT, Schedule
from flashtile.kv_cache import BlockManager

LOGITS_ROWS = 512
"""Rows of logits that exist at a time where every token of a prompt needs them."""
MAX_GRAPH_BATCH = 512
RING = 3
"""Steps of which the host's numbers are kept: one runs, one waits, one is written."""


def graph_batch(batch: int) -> int:
    """The batch size that a step of single tokens is padded to: 1, 2, 4, 8, then by 8, then by 32."""
    if batch <= 8:
        return 1 << (batch - 1).bit_length()
    step = 8 if batch <= 64 else 32
    return -(-batch // step) * step


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
        failed: by sample, the error of a function of its request's.
    """

    schedule: Schedule
    samples: list[Sequence]
    tokens: Tensor
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    prompt_scores: list[tuple[Sequence, int, tuple[Tensor, ...]]] = field(default_factory=list)
    event: Any = None

    def wait(self) -> list[int]:
        """The tokens, when they have come."""
        if self.event is not None:
            self.event.synchronize()
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


class Runner:
    """The model with its memory.

    Args:
        model: the layers, on their device.
        manager: whose blocks the memory is for.
        cache_dtype: of keys and values.
        max_num_batched_tokens: the most that a step computes.
        capture: use CUDA graphs where there is a GPU.
    """

    def __init__(
        self,
        model: Model,
        manager: BlockManager,
        cache_dtype: torch.dtype,
        max_num_batched_tokens: int,
        capture: bool = True,
    ):
        config = model.config
        self.model, self.manager = model, manager
        self.device = model.embedding.device
        pool, rows = manager.pool, manager.table.max_sequences
        # One block and one row more than are given out: what pads a batch writes there.
        shape = (config.num_layers, pool.num_blocks + 1, manager.block_size, model.kv_heads, config.head_dim)
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=cache_dtype, device=self.device) for _ in "kv")
        host = (config.num_layers, manager.host_pool.num_blocks, *shape[2:])
        on_gpu = self.device.type == "cuda"
        pinned = on_gpu and manager.host_pool.num_blocks > 0
        self.host_caches = [torch.zeros(host, dtype=cache_dtype, pin_memory=pinned) for _ in "kv"]
        self.spare_row = rows
        self.block_table = torch.zeros(
            rows + 1, manager.table.max_blocks, dtype=torch.int32, device=self.device
        )
        self.block_table[rows] = pool.num_blocks
        self.last_tokens = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        # The experts in use are known on the host only.
        self.capture = Capture(self.device) if capture and on_gpu and not config.num_experts else None
        self.graphs: dict[int, Callable[[], None]] = {}
        # Room for the largest step, whose every row of the block table is new. Graphs read from this place.
        count = max_num_batched_tokens + 8 * (rows + MAX_GRAPH_BATCH) + 2 * self.block_table.numel()
        self._numbers = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._pinned = [torch.empty(count, dtype=torch.int32, pin_memory=on_gpu) for _ in range(RING)]
        self._result = [torch.empty(rows, dtype=torch.int64, pin_memory=on_gpu) for _ in range(RING)]
        batch = graph_batch(min(rows, MAX_GRAPH_BATCH)) if self.capture is not None else 0
        # What all graphs write; each one of its own would take gigabytes.
        self._logits = model.embedding.new_zeros(batch, config.vocab_size)
        self._turn = 0
        self._draw: Draw | None = None

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
        single = all(entry.num_tokens == 1 for entry in schedule.entries)
        batch = len(schedule.entries)
        padded = graph_batch(batch)
        if single and padded <= len(self._logits) and all(entry.samples for entry in schedule.entries):
            _, positions = self._send(schedule, samples, padded, single)
            logits = self._replay(padded)
            if padded != batch or len(samples) != batch:
                logits = logits.index_select(0, positions.logits_rows)
            return self._choose(schedule, samples, logits, positions)
        step, positions = self._send(schedule, samples, batch, single)
        hidden = self.model.hidden(self._resolve(step), self.k_cache, self.v_cache)
        in_flight = InFlight(schedule, [], torch.empty(0, dtype=torch.int64))
        if samples:
            logits = self.model.logits(hidden.index_select(0, positions.logits_rows))
            in_flight = self._choose(schedule, samples, logits, positions)
        self._score_prompts(schedule, hidden, in_flight)
        return in_flight

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _send(
        self, schedule: Schedule, samples: list[Sequence], padded: int, single: bool
    ) -> tuple[StepInput, Positions]:
        """The step's numbers to the device, in one copy. In place of the block table stand its rows, and
        ``~row`` of it in place of a token that only the device knows."""
        entries, spare = schedule.entries, padded - len(schedule.entries)
        # What pads the batch writes to the spare block, each to a place of its own.
        starts = [entry.start for entry in entries] + [i % self.manager.block_size for i in range(spare)]
        rows = [entry.row for entry in entries] + [self.spare_row] * spare
        tokens: list[int] = []
        offsets, logits_rows, sample_positions = [0], [], []
        for entry in entries:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            known = [*sequence.tokens[entry.start : end], *sequence.guesses][: entry.num_tokens]
            tokens += known
            if len(known) < entry.num_tokens:  # the last one is on the device only: the row says where
                tokens.append(~entry.row)
            offsets.append(len(tokens))
            # A sequence and its forks draw from the last token's logits, one with guesses from each.
            last = len(sequence.guesses) if entry.samples else 0
            back = range(last, -1, -1) if last else [0] * len(entry.samples)
            logits_rows += [len(tokens) - 1 - i for i in back]
            sample_positions += [end - i for i in back]
        tokens += [0] * spare
        table_rows = self.manager.table
        sample_rows = [table_rows.row(s.block_sequence) for s in samples]  # type: ignore[arg-type]
        changed, values = self.manager.table.take_changes()
        parts = [starts, rows, tokens, logits_rows, sample_rows, sample_positions]
        if not single:
            parts.append(offsets)
        sizes = [len(part) for part in parts] + [len(changed)] * 2
        numbers = self._transfer(parts, (changed, values))
        views = numbers.split(sizes)
        if len(changed):
            self.block_table.view(-1).index_copy_(0, views[-2].long(), views[-1])
        step = StepInput(
            views[2], views[0], views[1],
            None if single else views[6].clone(),  # aligned, or kernels are compiled once more
            1 if single else max(entry.num_tokens for entry in entries),
        )  # fmt: skip
        return step, Positions(views[3], views[4].long(), views[5])

    def _resolve(self, step: StepInput) -> StepInput:
        """With tokens that are on the device only, and rows of the block table, in their places."""
        waiting = step.tokens < 0
        own = self.last_tokens.index_select(0, torch.where(waiting, ~step.tokens, 0))
        tokens = torch.where(waiting, own, step.tokens)
        return step._replace(tokens=tokens, block_table=self.block_table.index_select(0, step.block_table))

    def _transfer(self, parts: Listing[Listing[int]], tensors: tuple[Tensor, ...]) -> Tensor:
        """All numbers, one after another, on the device. The first ones always lie at the same addresses."""
        flat = array("i", [number for part in parts for number in part])
        count = len(flat) + sum(len(tensor) for tensor in tensors)
        pinned = self._pinned[self._turn]
        pinned[: len(flat)] = torch.frombuffer(flat, dtype=torch.int32)
        at = len(flat)
        for tensor in tensors:
            pinned[at : at + len(tensor)] = tensor
            at += len(tensor)
        self._numbers[:count].copy_(pinned[:count], non_blocking=True)
        return self._numbers[:count]

    def _replay(self, padded: int) -> Tensor:
        """(padded, vocab_size) logits of a step of single tokens, by its CUDA graph."""
        if padded not in self.graphs:
            assert self.capture is not None
            self.graphs[padded] = self.capture(self._step_of(padded))
        self.graphs[padded]()
        return self._logits[:padded]

    def _step_of(self, padded: int) -> Callable[[], None]:
        """A step of single tokens that reads its numbers from where :meth:`_send` puts them."""
        place = [self._numbers[i * padded : (i + 1) * padded] for i in range(3)]

        def run() -> None:
            step = self._resolve(StepInput(place[2], place[0], place[1], None, 1))
            hidden = self.model.hidden(step, self.k_cache, self.v_cache)
            self._logits[:padded] = self.model.logits(hidden)

        return run

    def _choose(
        self, schedule: Schedule, samples: list[Sequence], logits: Tensor, positions: Positions
    ) -> InFlight:
        """Choose a token for each sample, keep it on the device, and send it to the host."""
        raw, failed = logits, {}
        draw = self._draw_of(samples)
        shaped = [i for i in draw.shaped if _is_special(samples[i])]
        if shaped:
            logits = logits.float().clone()
        for i in shaped:
            try:
                self._shape(logits[i], samples[i])
            except Exception as error:  # of a logits processor: the others go on
                failed[i] = f"{type(error).__name__}: {error}"
        tokens = choose(logits, draw.choice, positions.positions)
        self.last_tokens.index_copy_(0, positions.rows, tokens.int())
        in_flight = InFlight(schedule, samples, tokens, failed=failed)
        for i, count in draw.scored:
            scored = raw[i : i + 1].float()
            params = samples[i].request.params
            if isinstance(params, BeamSearchParams) and params.temperature:
                scored = scored / params.temperature
            count = scored.shape[1] if count < 0 else count
            in_flight.scores[i] = log_probabilities(scored, tokens[i : i + 1], count)
        self._send_back(in_flight)
        return in_flight

    def _send_back(self, in_flight: InFlight) -> None:
        if self.device.type == "cpu":
            return
        place = self._result[self._turn][: len(in_flight.tokens)]
        in_flight.tokens = place.copy_(in_flight.tokens, non_blocking=True)
        in_flight.scores = {
            i: tuple(tensor.to("cpu", non_blocking=True) for tensor in found)
            for i, found in in_flight.scores.items()
        }
        in_flight.event = torch.cuda.Event()
        in_flight.event.record()

    def _draw_of(self, samples: list[Sequence]) -> Draw:
        """The parameters of the draw on the device, kept while the batch stays the same."""
        key = tuple(samples)
        if self._draw is not None and self._draw.samples == key:
            return self._draw
        rows = [_parameters(sample) for sample in samples]
        temperature, top_k, top_p, min_p, seed = (list(column) for column in zip(*rows, strict=True))
        floats = torch.tensor([temperature, top_p, min_p], dtype=torch.float32).to(self.device)
        integers = torch.tensor([top_k, seed], dtype=torch.int64).to(self.device)
        choice = Choice(
            floats[0], integers[0], floats[1], floats[2], integers[1],
            greedy=not any(temperature), any_top_k=any(top_k), any_top_p=any(p < 1 for p in top_p),
            any_min_p=any(min_p),
        )  # fmt: skip
        counts = [(i, _num_logprobs(sample)) for i, sample in enumerate(samples)]
        self._draw = Draw(
            key,
            choice,
            [i for i, sample in enumerate(samples) if _is_special(sample)],
            [(i, count) for i, count in counts if count is not None],
        )
        return self._draw

    def _shape(self, logits: Tensor, sample: Sequence) -> None:
        """What a request asks for beyond the draw, on its row of logits (vocab_size,) float32, in place."""
        request = sample.request
        params = request.params
        if isinstance(params, BeamSearchParams):
            return
        if params.allowed_token_ids:
            allowed = logits[params.allowed_token_ids]
            logits.fill_(-torch.inf)[params.allowed_token_ids] = allowed
        if params.penalises:
            tokens = torch.tensor(sample.tokens, dtype=torch.int64, device=self.device)
            split = request.num_prompt
            penalise(
                logits, tokens[:split], tokens[split:], params.repetition_penalty, params.presence_penalty,
                params.frequency_penalty,
            )  # fmt: skip
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=self.device)
            logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=self.device)
        for process in params.logits_processors or ():
            changed = process(sample.outputs, logits)
            if not isinstance(changed, Tensor) or changed.shape != logits.shape:
                raise ValueError("logits_processors must return logits of the shape that they got")
            logits.copy_(changed)
        if sample.num_outputs - 1 < params.min_tokens and request.ends:
            logits[list(request.ends)] = -torch.inf

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
                wanted = torch.tensor(targets, device=self.device)
                found = log_probabilities(logits, wanted, count)
                in_flight.prompt_scores.append((sequence, piece, tuple(tensor.cpu() for tensor in found)))

    def _move(self, what: str, pairs: Listing[tuple[int, int]]) -> None:
        """Copy blocks, in the order in which they were said."""
        numbers = torch.tensor(list(pairs), dtype=torch.int64)
        if what == COPY:
            copy_blocks(self.k_cache, self.v_cache, numbers.to(self.device))
            return
        for cache, host in zip((self.k_cache, self.v_cache), self.host_caches, strict=True):
            old, new = (cache, host) if what == SWAP_OUT else (host, cache)
            here, there = numbers[:, 0].to(old.device), numbers[:, 1].to(new.device)
            for layer in range(len(old)):
                source, target = (_bytes(memory[layer]) for memory in (old, new))
                target.index_copy_(0, there, source.index_select(0, here).to(target.device))


class Capture:
    """Makes CUDA graphs that share their memory: only one runs at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that replays what ``run`` does, which is run once to compile its kernels."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


@dataclass(frozen=True)
class Positions:
    """Of each sample, (samples,) on the device: its row of the logits, of the block table, and the place of
    its new token in the sequence."""

    logits_rows: Tensor
    rows: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Draw:
    """How the tokens of one batch are chosen: ``shaped`` are samples whose logits may be changed before,
    ``scored`` those with log-probabilities, and how many."""

    samples: tuple[Sequence, ...]
    choice: Choice
    shaped: list[int]
    scored: list[tuple[int, int]]


def _is_special(sample: Sequence) -> bool:
    """Whether its logits are changed before the draw."""
    params = sample.request.params
    return isinstance(params, SamplingParams) and bool(
        params.reads_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or sample.num_outputs - 1 < params.min_tokens
    )


def _num_logprobs(sample: Sequence) -> int | None:
    """Log-probabilities that are wanted; of a beam, enough that its ends leave a full width of others."""
    params = sample.request.params
    if isinstance(params, BeamSearchParams):
        return (len(sample.request.ends) + 1) * params.beam_width
    return params.logprobs


def _parameters(sample: Sequence) -> tuple[float, int, float, float, int]:
    """(temperature, top_k, top_p, min_p, seed); beams choose by their scores, whatever is drawn."""
    params = sample.request.params
    if isinstance(params, BeamSearchParams) or params.greedy:
        return 0.0, 0, 1.0, 0.0, 0
    seed = stream_seed(sample.request.seed, sample.index)
    return params.temperature, params.top_k, params.top_p, params.min_p, seed


def _bytes(memory: Tensor) -> Tensor:
    """The same memory as numbers that can be indexed on every device: FP8 has few operations."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
