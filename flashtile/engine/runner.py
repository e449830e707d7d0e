"""Execution of steps on the device: the KV cache, one transfer per step, CUDA graphs, and the draw of tokens.

All of a step's inputs go to the device in one copy of int32 numbers. The chosen tokens also stay on the
device, one token for each row of the block table, so that the next step can be launched before the host has
read the tokens. Steps in which every sequence has a single token, or a token with guesses, run as CUDA
graphs. There is one graph for each padded batch size, captured at its first use.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.api.decode import copy_blocks
from flashtile.engine.adjust import MAX_ADJUSTED, Adjusted, Adjuster, needs_adjusting
from flashtile.engine.device import MAX_GRAPH_BATCH, Capture, Transfer, graph_batch, on_device
from flashtile.engine.drafter import Drafter
from flashtile.engine.groups import MAX_LEVELS, MAX_NEW_TOKENS, Cascade, numbers_of_levels, row_length
from flashtile.engine.model import (
    MANY_TILES,
    SHARES,
    SHORT_BYTES,
    Groups,
    Model,
    StepInput,
)
from flashtile.engine.request import NOT_ERRORS, Sequence
from flashtile.engine.sampler import (
    Choice,
    Draw,
    Scores,
    choose,
    has_kernel,
    log_probabilities,
    process,
    processed,
    read_parameters,
)
from flashtile.engine.scheduler import COPY, SWAP_OUT, SchedulerOutput
from flashtile.engine.sleep import Freed
from flashtile.engine.speculation import UNKNOWN, depths, visible
from flashtile.engine.step_calls import LOGITS_ROWS
from flashtile.engine.structured import mask
from flashtile.kv_cache import BlockManager
from flashtile.kv_cache.paged import move_blocks
from flashtile.operators.decode import SharedKeys

MAX_CHANGES = 2**18
"""Largest number of changed block table entries that are sent with a step's other inputs."""
KV_CACHE, WEIGHTS = "kv_cache", "weights"
"""Tags of memory that is freed while the engine sleeps, as in vLLM."""
LOGPROBS_MODES = "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
NOT_FINITE = "the model's logits are NaN or infinite"
NO_TOKEN = "no token is left to choose: the request's parameters exclude every token"


@dataclass
class InFlight:
    """A launched step whose results are on their way to the host.

    Attributes:
        samples: the sequences that get a token, in the order of ``tokens``.
        tokens: the chosen tokens.
        best: results of :func:`flashtile.engine.sampler.choose` that tell whether the draws are valid.
        scores: log-probabilities by index of the sample, if requested.
        failed: error messages by index of the sample, for samples whose logits processor or structure raised
            or whose chosen logit is not finite.
        prompt_scores: (sequence, first position, log-probabilities) of prompts, if requested.
        drafted: sequences and the draft model's guesses for them.
        event: a CUDA event recorded after the copies to the host; None on a CPU.
    """

    samples: list[Sequence]
    tokens: Tensor
    best: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    scores: dict[int, Scores] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    prompt_scores: list[tuple[Sequence, int, Scores]] = field(default_factory=list)
    drafted: tuple[list[Sequence], Tensor] | None = None
    event: Any = None

    def wait(self) -> list[int]:
        """Wait for the results. Store the draft model's guesses in their sequences, and return the tokens."""
        if self.event is not None:
            self.event.synchronize()
        for i in (~self.best.isfinite()).nonzero().flatten().tolist():
            self.failed.setdefault(i, NO_TOKEN if self.best[i] == -torch.inf else NOT_FINITE)
        if self.drafted is not None:
            sequences, guesses = self.drafted
            for sequence, found in zip(sequences, guesses.tolist(), strict=False):
                sequence.guesses = found[: len(sequence.guesses)]
        return self.tokens.tolist()


class Form(NamedTuple):
    """The sizes and optional inputs of a step. The sizes are padded if a CUDA graph computes the step.

    Attributes:
        batch: number of sequences.
        tokens: total number of new tokens.
        width: largest number of new tokens of a sequence.
        has_slots: whether each token's position and cache slot are sent. Steps with guesses (draft tokens)
            need them.
        tree: whether tree masks are also sent. Steps whose guesses form a tree need them.
        runs_draft: whether the draft model also computes the step, because a sequence has no guesses.
        levels: (windows of the layers that have them, largest number of new tokens of a group at each level)
            of groups that share keys.
        few: (batch, tokens, width) of the first sequences, to which the groups belong, if the other sequences
            have too many new tokens for groups.
        short: whether one program reads a sequence's own keys of a key head (``model.SHORT_BYTES``). Only in
            graphs.
    """

    batch: int
    tokens: int
    width: int
    has_slots: bool = False
    tree: bool = False
    runs_draft: bool = False
    levels: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    few: tuple[int, int, int] | None = None
    short: bool = False


@dataclass
class Memory:
    """A model's KV cache: ``k`` and ``v`` on the device, and ``host``, the list [k, v] in host memory.

    Each tensor is (num_layers, num_blocks, block_size, kv_heads, head_dim). The blocks in host memory are for
    sequences that are swapped out.
    """

    k: Tensor
    v: Tensor
    host: list[Tensor]

    @classmethod
    def of(cls, model: Model, manager: BlockManager, dtype: torch.dtype) -> Memory:
        """Allocate the blocks of a manager, and one more block to which padding sequences write."""
        config, device = model.config, model.embedding.device
        blocks, host_blocks = manager.pool.num_blocks + 1, manager.host_pool.num_blocks
        block = (manager.block_size, model.kv_heads, config.head_dim)
        k, v = (torch.zeros(config.num_layers, blocks, *block, dtype=dtype, device=device) for _ in "kv")
        pinned = device.type == "cuda" and host_blocks > 0
        host = (config.num_layers, host_blocks, *block)
        return cls(k, v, [torch.zeros(host, dtype=dtype, pin_memory=pinned, device="cpu") for _ in "kv"])


class Runner:
    """Runs steps on the device: computes the model with its KV cache and CUDA graphs, and chooses tokens.

    Args:
        model, manager: the model on its device, and the blocks of the KV cache.
        cache_dtype: dtype of keys and values.
        max_num_batched_tokens: largest number of tokens of a step.
        capture: use CUDA graphs on a GPU.
        parents: parent of each guess in a sequence's largest tree of guesses
            (:mod:`flashtile.engine.speculation`).
        draft: a draft model that makes these guesses.
        logprobs_mode: what the log-probabilities of answers are, one of ``LOGPROBS_MODES``.
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
        logprobs_mode: str = "raw_logprobs",
    ):
        self.logprobs_mode = logprobs_mode
        self.model, self.manager, self.ranks = model, manager, model.ranks
        self.device, self.max_num_batched_tokens = model.embedding.device, max_num_batched_tokens
        self.memory = Memory.of(model, manager, cache_dtype)
        self._memories = [self.memory]
        rows = manager.table.max_sequences
        self.spare_row = rows
        self.block_table = torch.zeros(
            rows + 1, manager.table.max_blocks, dtype=torch.int32, device=self.device
        )
        self.block_table[rows] = manager.pool.num_blocks
        self.has_siblings = parents != tuple(range(len(parents)))
        # With siblings (several guesses for one position), a step may compute two known tokens before its
        # guesses. The keys and values of an accepted sibling are not in the slot of its position, so the next
        # step computes this token again.
        self.max_verified = len(parents) + 1 + self.has_siblings if parents else 1
        self.known = torch.zeros(rows + 1, 1 + len(parents), dtype=torch.int32, device=self.device)
        self.capture = Capture(self.device) if capture and self.device.type == "cuda" else None
        self.graphs: dict[Form, Callable[[], None]] = {}
        # The buffer of inputs has room for the largest step. A step's inputs include the changed entries of
        # the block table, at most MAX_CHANGES of them. CUDA graphs read their inputs from this buffer.
        padded = max_num_batched_tokens + MAX_GRAPH_BATCH * (1 + self.max_verified)
        samples = max_num_batched_tokens + rows
        changes = min(self.block_table.numel(), MAX_CHANGES)
        levels = numbers_of_levels(max(rows, MAX_GRAPH_BATCH), MAX_LEVELS) * len({*model.config.windows})
        numbers = 5 * padded + 3 * samples + 3 * (rows + MAX_GRAPH_BATCH) + 2 * changes + levels
        self._transfer = Transfer(numbers, self.device)
        batch = graph_batch(min(rows * self.max_verified, MAX_GRAPH_BATCH)) if self.capture is not None else 0
        # All graphs write their logits to the same buffer, because one buffer per graph would take gigabytes.
        self._logits = model.embedding.new_zeros(batch, model.config.vocab_size // self.ranks.world)
        # Free the graphs before the process leaves its group: NCCL waits for graphs that contain its kernels.
        weakref.finalize(self, self.graphs.clear)
        self._numbers_of = functools.lru_cache(2)(Cascade.numbers)
        self._draw_of = functools.lru_cache(1)(functools.partial(read_parameters, self.device))
        self._adjuster = Adjuster(self.known)
        self.asleep: dict[str, list[Freed]] = {}  # freed memory, by the tags of LLM.wake_up
        self.has_weights = True
        self.drafter: Drafter | None = None
        if draft is not None:
            memory = Memory.of(draft, manager, draft.embedding.dtype)
            self.drafter = Drafter(draft, memory.k, memory.v, self.block_table, self.known, parents)
            self._memories.append(memory)

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> InFlight:
        """Start a step. On a GPU, return before it is finished."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._launch(schedule)
        return self._launch(schedule)

    def _launch(self, schedule: SchedulerOutput) -> InFlight:
        for what, pairs in schedule.moves:
            self._move(what, pairs)
        in_flight = InFlight([], torch.empty(0, dtype=torch.int64, device="cpu"))
        if not schedule.entries:
            return in_flight
        samples = [sample for entry in schedule.entries for sample in entry.samples]
        form, captured = self._form(schedule)
        views, logits_rows, rows, positions = self._send(schedule, samples, form)
        guessed = [entry for entry in schedule.entries if entry.sequence.guesses[:1] == [UNKNOWN]]
        if guessed:
            assert self.drafter is not None
            self.drafter.draft(guessed, self.capture)
            self.known.copy_(self.ranks.broadcast(self.known))
        if captured:
            logits = self._replay(form)
            if not len(samples) == len(schedule.entries) == form.tokens:
                logits = logits.index_select(0, logits_rows)
            self.draw(in_flight, samples, logits, rows, positions)
        else:
            hidden = self._compute(views, form)
            if samples:
                logits = self.model.logits(hidden.index_select(0, logits_rows))
                self.draw(in_flight, samples, logits, rows, positions)
            self._score_prompts(schedule, hidden, in_flight)
        if guessed:
            rows = on_device([entry.row for entry in guessed], torch.int64, self.device)
            in_flight.drafted = [entry.sequence for entry in guessed], self.known[:, 1:].index_select(0, rows)
        self._send_back(in_flight)
        return in_flight

    def close(self) -> None:
        """Wait for the device and free the CUDA graphs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.graphs.clear()
        if self.drafter is not None:
            self.drafter.graphs.clear()

    @torch.inference_mode()
    def sleep(self, keep_weights: bool) -> None:
        """Free the memory of the KV cache and of the weights. See :meth:`flashtile.engine.LLM.sleep`."""
        self.close()
        caches = [self._logits, *(one for memory in self._memories for one in (memory.k, memory.v))]
        # Note each part as it is freed: if the host has no memory for the next one, wake_up restores it.
        self.asleep[KV_CACHE] = [Freed(caches, False)]
        self.asleep[WEIGHTS] = [Freed(self.model.weights, keep_weights)]
        self.has_weights &= keep_weights
        if self.drafter is not None:
            self.asleep[WEIGHTS].append(Freed(self.drafter.model.weights, True))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake_up(self, tag: str) -> None:
        """Allocate the memory of ``tag`` again, if it was freed."""
        for freed in self.asleep.get(tag, ()):
            freed.restore()
        self.asleep.pop(tag, None)  # not earlier: the device may have no memory yet

    def _form(self, schedule: SchedulerOutput) -> tuple[Form, bool]:
        """Return the sizes of a step, and whether a CUDA graph computes it."""
        entries, cascades = schedule.entries, schedule.cascades
        total, most = (f(entry.num_tokens for entry in entries) for f in (sum, max))
        # Whether every sequence gets a token from this step, and has one new token or guesses (draft tokens).
        single = all(entry.samples and (entry.num_tokens == 1 or entry.sequence.guesses) for entry in entries)
        runs_draft = self.drafter is not None and not all(entry.sequence.guesses for entry in entries)
        has_slots = single and most > 1
        tree = has_slots and self.has_siblings
        sizes, few, captured = (len(entries), total, most), None, False
        if single and self.capture is not None:
            batch, width = graph_batch(len(entries)), self.max_verified if has_slots else 1
            if batch * width <= len(self._logits):
                sizes, captured = (batch, batch * width, width), True
        if cascades and most > MAX_NEW_TOKENS:
            counts = [entry.num_tokens for entry in entries if entry.num_tokens <= MAX_NEW_TOKENS]
            few = len(counts), sum(counts), max(counts)
        _, tokens, width = few or sizes
        levels = tuple((tuple(windows), one.longest(width, tokens)) for one, windows in cascades.items())
        short = captured and sizes[2] == 1 and self._is_short(schedule, sizes[0])
        return Form(*sizes, has_slots, tree, runs_draft, levels, few, short), captured

    def _is_short(self, schedule: SchedulerOutput, batch: int) -> bool:
        """Whether the step is short (``model.SHORT_BYTES``). ``batch``: the padded number of sequences."""
        model, config, entries = self.model, self.model.config, schedule.entries
        if not model.may_be_short(batch):
            return False
        tiles = batch * model.kv_heads
        # An element of an FP8 cache takes as long as one of 16 bits.
        most = SHORT_BYTES // (2 * 2 * config.head_dim)
        shared = [self._numbers_of(one, batch) for one in schedule.cascades]
        if sum(map(len, schedule.cascades.values())) < len({*config.windows}):
            shared.append(array("i", bytes(4 * batch)))  # layers with this window have no groups
        for ends in shared:
            own = [entry.start + 1 - end for entry, end in zip(entries, ends, strict=False)]
            total, longest = sum(own), max(own)
            few_each = total <= most * len(own)
            if longest > most and not (
                tiles >= MANY_TILES and few_each and longest * SHARES <= total * model.kv_heads
            ):
                return False
        return True

    def _send(
        self, schedule: SchedulerOutput, samples: list[Sequence], form: Form
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Send a step's inputs to the device.

        Returns the inputs for :meth:`_step` and, for each sample, its row of the logits, its row of the block
        table, and the position of its new token.

        The device has a copy of the block table, so only the sequences' row indices are sent. The host may
        not know a sequence's last token and guesses yet. The device has these tokens in ``self.known``. The
        host then sends ``~index`` for a token, where ``index`` is the token's place in the flattened
        ``self.known``.
        """
        entries, spare = schedule.entries, form.batch - len(schedule.entries)
        table, size = self.manager.table, self.manager.block_size
        # Padding sequences write to different slots of the spare block.
        starts = [entry.start for entry in entries] + [i % size for i in range(spare)]
        rows = [entry.row for entry in entries] + [self.spare_row] * spare
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        masks: list[int] = []
        offsets, logits_rows, sample_positions = [0], [], []
        for entry in entries:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            # Index of the sequence's last token in the flattened ``self.known``.
            known_at = entry.row * self.known.shape[1]
            # Fast path: most steps have only sequences with one new token.
            if entry.num_tokens == 1 and not (sequence.guesses or form.has_slots):
                known = entry.start < len(sequence.tokens)
                tokens.append(sequence.tokens[entry.start] if known else ~known_at)
                logits_rows += [len(tokens) - 1] * len(entry.samples)
                sample_positions += [end] * len(entry.samples)
                offsets.append(len(tokens))
                continue
            new = [*sequence.tokens[entry.start : end], *sequence.guesses][: entry.num_tokens]
            if len(new) < entry.num_tokens:  # the last token is on the device only
                new.append(~known_at)
            guesses = sequence.guesses
            if guesses[:1] == [UNKNOWN]:
                new[-len(guesses) :] = (~(known_at + 1 + i) for i in range(len(guesses)))
            tokens += new
            # Without guesses, a sequence and its forks draw from the last token's logits. A sequence with
            # guesses draws from the logits of the last known token and of each guess.
            last = len(guesses) if entry.samples else 0
            first = end - last  # position of the first guess
            depth = depths(sequence.parents[:last]) if last else [0]
            if last and not form.has_slots:
                # A batch with a chunk of a prompt has no tree mask. Treat the guesses as a chain, so that no
                # sibling (a guess outside the chain) is accepted.
                sequence.parents = tuple(range(max(depth)))
            times = 1 if last else len(entry.samples)
            logits_rows += [len(tokens) - 1 - last + i for i in range(1 + last)] * times
            sample_positions += [first + d for d in depth] * times
            offsets.append(len(tokens))
            if form.has_slots:
                positions += range(entry.start, first - 1)
                positions += [first - 1 + d for d in depth]
                begin = entry.row * table.max_blocks
                slots += [table.entries[begin + i // size] * size + i % size for i in range(entry.start, end)]
            if form.tree:
                lead = first - 1 - entry.start
                below = (1 << lead) - 1
                seen = [(2 << i) - 1 for i in range(lead)]
                seen += [bits << lead | below for bits in visible(sequence.parents[:last])]
                masks += seen + [0] * (form.width - len(seen))
        if form.has_slots:
            masks += [0] * (form.width * spare) if form.tree else []
            positions += [0] * (form.tokens - len(positions))
            slots += [-1] * (form.tokens - len(slots))
        offsets += [len(tokens)] * spare if form.has_slots else []
        tokens += [0] * (form.tokens - len(tokens))
        sample_rows = [  # forks have other rows than the sequence that computed the prompt
            entry.row if s is entry.sequence else table.row(s.block_sequence)  # type: ignore[arg-type]
            for entry in entries for s in entry.samples
        ]  # fmt: skip
        changed, values = table.take_changes()
        if len(changed) > MAX_CHANGES:  # for example when many sequences share a long prefix
            self._update_table(changed.to(self.device), values.to(self.device))
            changed, values = changed[:0], values[:0]
        parts: list[Listing[int]] = [starts, rows, tokens]
        if form.width > 1:
            parts += [offsets, positions, slots, array("i", array("Q", masks).tobytes())]
        parts += [self._numbers_of(cascade, (form.few or form)[0]) for cascade in schedule.cascades]
        views = self._transfer([*parts, logits_rows, sample_rows, sample_positions], (changed, values))
        if len(changed):
            self._update_table(views[-2].long(), views[-1])
        return views, views[-5], views[-4].long(), views[-3]

    def _update_table(self, places: Tensor, blocks: Tensor) -> None:
        self.block_table.view(-1).index_copy_(0, places, blocks)

    def _step(self, views: list[Tensor], form: Form) -> StepInput:
        """Build the step's inputs from the views that :meth:`_send` filled."""
        starts, rows, tokens = views[:3]
        missing = tokens < 0
        known = self.known.view(-1).index_select(0, torch.where(missing, ~tokens, 0))
        table = self.block_table.index_select(0, rows)
        step = StepInput(torch.where(missing, known, tokens), starts, table, None, 1, short=form.short)
        # A view may begin at an unaligned address, for which Triton would compile the kernels again. A clone
        # is always aligned.
        if form.width > 1:
            step = step._replace(cu_seqlens_q=views[3].clone(), max_seqlen_q=form.width)
        if form.has_slots:
            step = step._replace(positions=views[4].clone(), slots=views[5].long())
        if form.tree:
            rows_of_masks = views[6].clone().view(torch.int64).unsqueeze(1)
            seen = rows_of_masks >> torch.arange(form.width, device=self.device) & 1
            step = step._replace(tree_mask=(seen != 0).view(form.batch, form.width, form.width))
        (batch, count, width), ends = form.few or form[:3], step.cu_seqlens_q
        offsets = None if ends is None or width == 1 else ends[: batch + 1]
        groups = self._groups(views, form, batch, offsets)
        if form.few is None or ends is None:
            return step._replace(groups=groups)
        few = StepInput(step.tokens[:count], starts[:batch], table[:batch], offsets, width, groups=groups)
        many = StepInput(
            step.tokens[count:],
            starts[batch:].clone(),
            table[batch:].clone(),
            ends[batch:] - count,
            form.width,
        )
        return step._replace(parts=(few, many))

    def _groups(
        self, views: list[Tensor], form: Form, batch: int, cu_seqlens_q: Tensor | None
    ) -> dict[int, Groups]:
        """Return the groups among the first ``batch`` sequences, by the window of the layers.

        ``cu_seqlens_q``: where these sequences' new tokens start. None: one each.
        """
        found, rows = dict[int, Groups](), views[1]
        for (windows, longest), view in zip(form.levels, views[7 if form.width > 1 else 3 :], strict=False):
            levels = list[SharedKeys]()
            shared_keys, *numbers = view.clone().view(-1, row_length(batch)).unbind()  # Cascade.numbers
            for i, most in enumerate(longest):
                offsets, first, end = numbers[3 * i : 3 * i + 3]
                table = rows.index_select(0, offsets[:batch].clamp(max=batch - 1))
                table = self.block_table.index_select(0, table)
                offsets = offsets[: batch + 1]
                if cu_seqlens_q is not None:
                    offsets = cu_seqlens_q.index_select(0, offsets)
                begin = None if i == 0 and min(windows) < 0 else first[:batch]
                levels.append(SharedKeys(table, end[:batch], begin, offsets, most, tables={}))
            found |= dict.fromkeys(windows, Groups(tuple(levels), shared_keys[:batch]))
        return found

    def _compute(self, views: list[Tensor], form: Form) -> Tensor:
        """Return the model's hidden states (tokens, hidden_size) for the views that :meth:`_send` filled.

        With ``form.runs_draft``, the draft model also computes the step and appends to its own cache.
        """
        step = self._step(views, form)
        if form.runs_draft:
            assert self.drafter is not None
            self.drafter.follow(step)
        return self.model.hidden(step, self.memory.k, self.memory.v)

    def _replay(self, form: Form) -> Tensor:
        """Run a step as a CUDA graph and return its logits (form.tokens, vocab_size)."""
        if form not in self.graphs:
            assert self.capture is not None
            self.graphs[form] = self.capture(self._captured_step(form))
        self.graphs[form]()
        return self.ranks.join(self._logits[: form.tokens])

    def _captured_step(self, form: Form) -> Callable[[], None]:
        """Return a function that runs a step on the buffer that :meth:`_send` fills."""
        sizes = [form.batch, form.batch, form.tokens]
        if form.width > 1:
            words = 2 * form.batch * form.width * form.tree  # a row of a tree mask has 64 bits
            sizes += [form.batch + 1, form.tokens, form.tokens, words]
        sizes += [numbers_of_levels(form.batch, len(longest)) for _, longest in form.levels]
        views = list(self._transfer.numbers[: sum(sizes)].split(sizes))

        def run() -> None:
            hidden = self._compute(views, form)
            self._logits[: form.tokens] = self.model.own_logits(hidden)

        return run

    def draw(
        self, in_flight: InFlight, samples: list[Sequence], logits: Tensor, rows: Tensor, positions: Tensor
    ) -> None:
        """Choose a token for each sample, and store it in ``known`` for the next step."""
        raw, draw = logits, self._draw_of(tuple(samples))
        mode = self.logprobs_mode
        adjusted = self._adjusted(samples, draw)
        # The sampling kernel changes logits itself. All else reads them from a copy of the logits.
        listed = None
        if adjusted is not None:
            reads_all = draw.processed or draw.structured or (draw.scored and mode.startswith("processed"))
            if has_kernel(logits) and not reads_all and adjusted.most <= MAX_ADJUSTED:
                listed = adjusted
            else:
                logits = adjusted.apply(logits)
        elif draw.processed:
            logits = logits.to(torch.float32, copy=True)
        for i in draw.processed:
            try:
                process(logits[i], samples[i])
            except NOT_ERRORS:
                raise
            except BaseException as error:  # a logits processor failed: the other requests continue
                in_flight.failed[i] = f"{type(error).__name__}: {error}"
        if draw.structured:
            logits, failed = mask(logits, [(samples[i].matcher, i) for i in draw.structured])
            in_flight.failed |= failed
        tokens, in_flight.best = choose(logits, draw.choice, positions, listed)
        tokens = self.ranks.broadcast(tokens)
        self.known[:, 0].index_copy_(0, rows, tokens.int())
        in_flight.samples, in_flight.tokens = samples, tokens
        for i, count in draw.scored:
            scored = raw[i : i + 1].float()
            beam = samples[i].request.beam
            mode = self.logprobs_mode if beam is None else LOGPROBS_MODES[0]
            if beam is not None and beam.temperature:
                scored = scored / beam.temperature
            elif mode.startswith("processed"):
                own: list[Any] = [of[i : i + 1] if isinstance(of, Tensor) else of for of in draw.choice]
                scored = processed(logits[i : i + 1], Choice(*own), tokens[i : i + 1])
            count = scored.shape[1] if count < 0 else count
            normalise = mode.endswith("logprobs")
            in_flight.scores[i] = log_probabilities(scored, tokens[i : i + 1], count, normalise)

    def _adjusted(self, samples: list[Sequence], draw: Draw) -> Adjusted | None:
        """Return the changes of logits by the parameters of the samples' requests, if any."""
        changed = [(i, samples[i]) for i in draw.adjusted if needs_adjusting(samples[i])]
        if not changed:
            return None
        first = {sample: i for i, sample in reversed(list(enumerate(samples)))}
        row_of = self.manager.table.row
        rows = [
            (i, one, row_of(one.block_sequence), _unread(one, i - first[one]))  # type: ignore[arg-type]
            for i, one in changed
        ]
        return self._adjuster(len(samples), rows)

    def _send_back(self, in_flight: InFlight) -> None:
        if self.device.type == "cpu":
            return
        in_flight.tokens, in_flight.best = _to_host((in_flight.tokens, in_flight.best))
        if in_flight.drafted is not None:
            sequences, guesses = in_flight.drafted
            in_flight.drafted = sequences, _to_host((guesses,))[0]
        in_flight.scores = {i: Scores(*_to_host(found)) for i, found in in_flight.scores.items()}
        in_flight.prompt_scores = [
            (sequence, first, Scores(*_to_host(found))) for sequence, first, found in in_flight.prompt_scores
        ]
        in_flight.event = torch.cuda.Event()
        in_flight.event.record()

    def _score_prompts(self, schedule: SchedulerOutput, hidden: Tensor, in_flight: InFlight) -> None:
        """Compute the requested log-probabilities of prompt tokens, ``LOGITS_ROWS`` rows at a time."""
        at = 0
        for entry in schedule.entries:
            first, at = at, at + entry.num_tokens
            request, sequence = entry.sequence.request, entry.sequence
            params = request.params
            if params.prompt_logprobs is None:
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
        """Copy blocks within the device, or to or from the host.

        ``pairs`` holds (source, target) blocks, in the order in which they must be copied.
        """
        for memory in self._memories:
            if what == COPY:
                copy_blocks(memory.k, memory.v, on_device(list(pairs), torch.int64, self.device))
                continue
            sources, targets = zip(*pairs, strict=True)
            for cache, host in zip((memory.k, memory.v), memory.host, strict=True):
                old, new = (cache, host) if what == SWAP_OUT else (host, cache)
                origins = on_device(sources, torch.int64, old.device)
                move_blocks(old, new, origins, on_device(targets, torch.int64, new.device))


def _unread(sample: Sequence, node: int) -> list[int]:
    """Return the tokens before the draw after ``node`` that a sequence does not have yet.

    They are the token that the step in flight draws, or the guesses from the sequence's last token to the one
    that the draw follows. A token that only the device knows is ``~column`` of ``Runner.known``.
    """
    if not sample.request.params.penalises:
        return []  # only penalties depend on them
    columns = [0] * (sample.pending > 1)
    while 0 < node <= len(sample.parents):  # a step without a tree mask verifies no siblings
        columns.append(node)
        node = sample.parents[node - 1]
    if sample.guesses[:1] not in ([], [UNKNOWN]):
        return [sample.guesses[node - 1] for node in columns]
    return [~column for column in columns]


def _to_host(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Start copies to the host, for which torch allocates pinned memory."""
    return tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
