"""Scheduling of steps: continuous batching over PagedAttention's blocks.

There are no separate prefill and decode phases. Each step computes at most ``max_num_batched_tokens`` tokens:
chunks of prompts together with single tokens of other sequences. Running sequences come first, in the order
of (priority, arrival). A sequence that finds no free block preempts the last running sequence, which is
recomputed later or swapped out. The first sequence can always continue, so every request ends.

The scheduler only decides: it touches no tensor and never waits. Copies of blocks are listed in the schedule,
in the order in which they must be made.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from flashtile.engine.groups import Cascades, PrefixGroups
from flashtile.engine.request import Request, Sequence, State
from flashtile.kv_cache import BlockManager, OutOfBlocksError
from flashtile.kv_cache.pool import Copies

COPY, SWAP_OUT, SWAP_IN = "copy", "swap out", "swap in"
ORDER = attrgetter("order")


class Entry(NamedTuple):
    """New tokens of a sequence in a step.

    Attributes:
        start, num_tokens: position of the first new token, and number of new tokens.
        row: the sequence's row of the block table.
        samples: the sequences that get a token from the logits of the last new token: none while the prompt
            is incomplete, otherwise the sequence and its forks of this step. A sequence with guesses (draft
            tokens) is listed ``1 + len(guesses)`` times, because a token is also drawn after each guess.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    row: int
    samples: tuple[Sequence, ...]


@dataclass
class SchedulerOutput:
    """The plan of a step.

    Attributes:
        entries: the sequences and tokens to compute.
        moves: (kind, pairs of blocks): copies and swaps to make before the step, in this order.
        preempted: sequences that lost their memory.
        swapped: sequences that the moves swap out or in.
        cascades: groups of entries that read their common blocks together, and the windows of the layers that
            do so. In other layers each entry reads its own.
    """

    entries: list[Entry] = field(default_factory=list)
    moves: list[tuple[str, Copies]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swapped: list[Sequence] = field(default_factory=list)
    cascades: Cascades = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def move(self, what: str, pairs: Copies) -> None:
        """Append copies or swaps of blocks, given as (source, target) pairs.

        Copies are merged with the preceding copies if the order does not matter.
        """
        if not pairs:
            return
        if what == COPY and self.moves and self.moves[-1][0] == COPY:
            before = self.moves[-1][1]
            touched = {block for pair in before for block in pair}
            written = {target for _, target in before}
            if not any(source in written or target in touched for source, target in pairs):
                before.extend(pairs)
                return
        self.moves.append((what, list(pairs)))


class Scheduler:
    """Plans steps for the unfinished requests, and assigns blocks to their sequences.

    Args:
        manager: the block manager. Its ``max_sequences`` bounds the sequences with memory on the device or,
            swapped out, on the host. Preempted sequences are swapped if the host has room, else recomputed.
        max_num_batched_tokens: maximum number of tokens of a step.
        prefix_caching: reuse blocks of earlier prompts and answers.
        groups: finds the sequences of a step that share blocks. None: steps have no groups.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        groups: PrefixGroups | None = None,
    ):
        self.manager, self.prefix_caching, self.groups = manager, prefix_caching, groups
        self.max_num_seqs = manager.table.max_sequences
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0
        # At most max_num_seqs sequences may hold memory. Each takes one of these "seats".
        self._reserved_seats = 0  # seats reserved for answers that are not forked yet
        self._beam_searches: set[Request] = set()
        self._full = False  # whether a sequence waits for a seat
        self._restart = False  # whether the next step forgets all keys and values
        # The last sequence that was not started for lack of blocks, and the blocks available at that time.
        self._stuck: tuple[Sequence | None, int] = None, 0

    def add(self, request: Request) -> None:
        """Queue a new request. Raise ValueError if the request needs more blocks than the pool has."""
        if request.width > self.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs={self.max_num_seqs}, got {request.width}")
        pool, size = self.manager.pool, self.manager.block_size
        longest = request.num_prompt + request.max_outputs
        window = self.manager.window_left
        if window >= 0:
            # Only the new chunk and the window before it stay in memory. The first and the last of their
            # blocks may be partial.
            longest = min(longest, window + self.max_num_batched_tokens + 2 * size)
        needed = -(-longest // size)
        blocks = pool.num_blocks - pool.null_blocks
        if needed > blocks:
            raise ValueError(
                f"the prompt's {request.num_prompt} tokens with max_tokens={request.max_outputs} need "
                f"{needed} blocks of keys and values, got a cache of {blocks} blocks"
            )
        for sequence in request.sequences:
            insort(self.waiting, sequence, key=ORDER)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and reserve its memory. The plan is empty if nothing can be computed now."""
        step, budget = SchedulerOutput(), self.max_num_batched_tokens
        if self._restart:
            self._forget_all(step)
        running = [(sequence, sequence.wanted) for sequence in self.running]
        singles = sum(wanted == 1 for _, wanted in running)
        for sequence, wanted in running:
            if wanted == 0 or sequence.state is not State.RUNNING:
                continue
            singles -= wanted == 1
            # A chunk of a prompt must leave budget for later sequences that need a single token.
            count = min(wanted, budget if wanted == 1 else max(0, budget - singles))
            if sequence.guesses:  # verify all draft tokens or none, without preempting another sequence
                fits = sequence.num_computed + count <= self.manager.max_seqlen
                if count == wanted and fits and self._make_room(sequence, count, step, preempt=False):
                    self._enter(sequence, count, step)
                    budget -= count
                    continue
                sequence.guesses = []
                count = min(sequence.wanted, count)
            if count and self._make_room(sequence, count, step):
                self._enter(sequence, count, step)
                budget -= count
        if not step.preempted:
            self._admit(budget, step)
        self._cache_prompts(step)
        if self.groups is not None:
            step.entries, step.cascades = self.groups(step.entries)
        return step

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> int:
        """Empty the prefix cache and return the number of blocks that it held.

        With ``reset_running_requests``, the next step also preempts all sequences, and later steps compute
        all their tokens again. It is not done now, because a launched step may verify their guesses.
        """
        self._restart |= reset_running_requests
        return self.manager.reset_prefix_cache()

    def drop_guesses(self, sequence: Sequence) -> None:
        """Drop a sequence's guesses (draft tokens), once the results of the step that verified them are read.

        The blocks of rejected guesses are freed.
        """
        sequence.guesses = []
        if sequence.block_sequence is not None:
            self.manager.truncate(sequence.block_sequence, sequence.num_computed)

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence and release its memory. Its full blocks stay in the prefix cache."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.state, sequence.finish_reason, sequence.stop_reason = State.FINISHED, reason, stop_reason

    def replace(self, old: list[Sequence], new: list[Sequence], parents: list[int]) -> None:
        """Replace beams. ``new[i]`` continues ``old[parents[i]]``, and shares or takes over its blocks."""
        manager, left = self.manager, list(parents)
        for i, sequence in enumerate(old):
            if i not in left:
                self.finish(sequence, "dropped")
        for sequence, parent in zip(new, parents, strict=True):
            origin = old[parent]
            left.remove(parent)
            sequence.forked = True
            blocks, last = origin.block_sequence, parent not in left
            if blocks is None:
                insort(self.waiting, sequence, key=ORDER)
            else:
                sequence.block_sequence = blocks if last else manager.fork(blocks)
                sequence.num_computed, sequence.state = origin.num_computed, State.RUNNING
                insort(self.running, sequence, key=ORDER)
            if last:
                origin.block_sequence = None  # its last child has them
                self.finish(origin, "dropped")

    def _make_room(self, sequence: Sequence, count: int, step: SchedulerOutput, preempt: bool = True) -> bool:
        """Reserve blocks for new tokens, and preempt other sequences for them if ``preempt``."""
        assert sequence.block_sequence is not None
        while True:
            try:
                step.move(COPY, self.manager.reserve(sequence.block_sequence, count))
                return True
            except OutOfBlocksError:
                victim = self._victim(sequence) if preempt else None
                if victim is None:
                    return False
                self._preempt(victim, sequence, step)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence to preempt, or None if there is none.

        The result is the last running sequence. If ``sequence`` itself is the last one, the result is a held
        beam, which waits for the tokens of the other beams. The result is never part of the step that is
        being planned: sequences are added to a step in order, and held beams are not added at all.
        """
        last = self.running[-1]
        if last is not sequence:
            return last
        return next((one for one in reversed(self.running) if one.held and one is not sequence), None)

    def _preempt(self, victim: Sequence, keeper: Sequence, step: SchedulerOutput) -> None:
        request = victim.request
        self._interrupt(victim, step)
        if self.manager.host_pool.num_blocks and not victim.held and victim.block_sequence is not None:
            # Answers of a request are swapped together, so that their shared blocks stay shared.
            entered = {one for entry in step.entries for one in (entry.sequence, *entry.samples)}
            group = [
                one for one in request.sequences
                if one.state is State.RUNNING and not one.held and one not in entered and one is not keeper
            ]  # fmt: skip
            for one in group:
                one.guesses = []
            if self._swap(victim, group, SWAP_OUT, step):
                return
        self.running.remove(victim)
        insort(self.waiting, victim, key=ORDER)
        self._forget(victim)

    def _interrupt(self, victim: Sequence, step: SchedulerOutput) -> None:
        """Drop a running sequence's guesses and count its preemption."""
        victim.request.metrics.preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(victim)
        victim.guesses = []

    def _forget(self, victim: Sequence) -> None:
        """Release the memory of a sequence, which is computed again."""
        self._release(victim)
        victim.state, victim.num_computed = State.WAITING, 0

    def _forget_all(self, step: SchedulerOutput) -> None:
        """Preempt all sequences, also those that are swapped out, and empty the prefix cache."""
        for victim in self.running:
            self._interrupt(victim, step)
        for victim in (*self.running, *(one for one in self.waiting if one.state is State.SWAPPED)):
            self._forget(victim)
        self.waiting = sorted([*self.waiting, *self.running], key=ORDER)
        self.running, self._restart = [], False
        self.manager.reset_prefix_cache()

    def _admit(self, budget: int, step: SchedulerOutput) -> None:
        """Admit the sequences that wait, in order, while tokens of the budget, seats and blocks are left.

        A seat is a place for one of the ``max_num_seqs`` sequences that may hold memory. While a sequence
        waits for a seat, no sequence starts before ``max_num_seqs // 32`` seats are free. Several prompts
        then start in the same step, so fewer steps contain a prompt. A step with a prompt is slower than a
        step of single tokens, which runs as a CUDA graph.
        """
        seats = self.max_num_seqs - self._seats_taken()
        if self._full and self.running and seats < self.max_num_seqs // 32:
            return
        self._full = False
        for sequence in list(self.waiting):
            if budget <= 0:
                return
            if sequence.pending or sequence.held or sequence.state not in (State.WAITING, State.SWAPPED):
                continue  # not ready, or already swapped in together with another sequence
            if sequence.state is State.SWAPPED:
                swapped = [one for one in sequence.request.sequences if one.state is State.SWAPPED]
                group = [one for one in swapped if not one.pending]
                if not self._swap(sequence, group, SWAP_IN, step):
                    return
                count = min(sequence.wanted, budget)
                if not count or not self._make_room(sequence, count, step, preempt=False):
                    continue
            else:
                if self._seats_taken() + self._seats(sequence) > self.max_num_seqs:
                    self._full = True
                    continue
                count = self._start(sequence, budget, step)
                if not count:
                    return
                self.waiting.remove(sequence)
                sequence.state = State.RUNNING
                insort(self.running, sequence, key=ORDER)
            self._enter(sequence, count, step)
            budget -= count

    def _seats(self, sequence: Sequence) -> int:
        """Return how many of the ``max_num_seqs`` seats (see :meth:`_admit`) a sequence needs to start.

        A sequence also needs the seats of its later forks. A beam search takes the seats of all its beams at
        once and keeps them until it ends.
        """
        if sequence.request.beam is not None:
            return 0 if sequence.request in self._beam_searches else sequence.request.width
        return 1 if sequence.forked else sequence.request.width

    def _seats_taken(self) -> int:
        taken = len(self.manager.table.rows) + self._reserved_seats
        if self._beam_searches:
            self._beam_searches = {one for one in self._beam_searches if not one.finished}
            for request in self._beam_searches:
                taken += request.width - sum(one.block_sequence is not None for one in request.sequences)
        return taken

    def _start(self, sequence: Sequence, budget: int, step: SchedulerOutput) -> int:
        """Reserve memory for a sequence's first tokens and return the number of these tokens.

        Returns 0 if the free blocks do not suffice for all tokens of the sequence.
        """
        manager, request = self.manager, sequence.request
        stuck, available = self._stuck
        if stuck is sequence and self.running and manager.pool.available <= available:
            return 0
        # Cached tokens yield no logits, so a request for log-probabilities of the prompt computes all of it.
        reads = self.prefix_caching and (request.params.prompt_logprobs is None or sequence.forked)
        number = manager.create(sequence.tokens if reads else (), request.salt)
        found, size = manager.length(number), manager.block_size
        needed = -(-len(sequence.tokens) // size) - found // size
        spare = len(self.running)  # each running sequence may need a block soon
        count = min(len(sequence.tokens) - found, budget)
        fits = not self.running or manager.window_left >= 0 or needed + spare <= manager.pool.available
        sequence.block_sequence = number
        if not fits or not self._make_room(sequence, count, step, preempt=False):
            manager.free(number)
            sequence.block_sequence = None
            self._stuck = sequence, manager.pool.available
            return 0
        sequence.num_computed = found
        if request.beam is not None:
            self._beam_searches.add(request)
        elif not sequence.forked:
            self._reserved_seats += request.width - 1
        if request.metrics.first_scheduled_time is None:
            request.num_cached_tokens = found
            self.prefix_queries += request.num_prompt * self.prefix_caching
            self.prefix_hits += found
        return count

    def _swap(self, sequence: Sequence, group: list[Sequence], what: str, step: SchedulerOutput) -> bool:
        """Swap a sequence with its group, or alone if the group has no room. Return False if neither fits."""
        out = what == SWAP_OUT
        move = self.manager.swap_out if out else self.manager.swap_in
        for together in (group, [sequence]) if len(group) > 1 else ([sequence],):
            try:
                pairs = move(one.block_sequence for one in together)  # type: ignore[misc]
            except OutOfBlocksError:
                continue
            step.move(what, pairs)
            step.swapped += together
            for one in together:
                (self.running if out else self.waiting).remove(one)
                one.state, one.num_cached = State.SWAPPED if out else State.RUNNING, 0
                insort(self.waiting if out else self.running, one, key=ORDER)
            return True
        return False

    def _enter(self, sequence: Sequence, count: int, step: SchedulerOutput) -> None:
        """Add the next ``count`` tokens of a sequence to the step.

        If these tokens complete the prompt, the sequence is forked into the request's answers.
        """
        start = sequence.num_computed
        assert sequence.block_sequence is not None
        complete = start + count == sequence.num_tokens + len(sequence.guesses)
        row = self.manager.table.rows[sequence.block_sequence]
        samples: tuple[Sequence, ...] = ()
        sequence.num_computed += count
        if complete:
            samples = (sequence,) if sequence.forked else (sequence, *self._fork(sequence))
            for one in samples:
                one.pending += 1
            samples += (sequence,) * len(sequence.guesses)
        step.entries.append(Entry(sequence, start, count, row, samples))

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Fork a request's other answers from the sequence that computed the prompt, and return the forks.

        Returns an empty list for beams, which are forked by :meth:`replace`.
        """
        request, sequence.forked = sequence.request, True
        if request.beam is not None:
            return []
        self._reserved_seats -= request.width - 1
        assert sequence.block_sequence is not None
        forks, sequence.shares_tokens = [], request.width > 1
        numbers = self.manager.fork_many(sequence.block_sequence, request.width - 1)
        for index, number in enumerate(numbers, 1):
            # The step waits for the forks, and a copy of 1,024 tokens would take two thirds of their time.
            fork = Sequence(request, index, sequence.tokens)
            fork.shares_tokens = True
            fork.block_sequence = number
            fork.num_computed, fork.state, fork.forked = sequence.num_computed, State.RUNNING, True
            insort(self.running, fork, key=ORDER)
            forks.append(fork)
        request.sequences += forks
        return forks

    def _cache_prompts(self, step: SchedulerOutput) -> None:
        """Put prompts that this step completes into the prefix cache, so that later steps can use them."""
        if not self.prefix_caching:
            return
        for sequence, start, count, _, samples in step.entries:
            if samples and start < sequence.request.num_prompt <= start + count:
                self._cache(sequence, sequence.request.num_prompt)

    def _cache(self, sequence: Sequence, count: int) -> None:
        assert sequence.block_sequence is not None
        if count // self.manager.block_size > sequence.num_cached // self.manager.block_size:
            self.manager.cache_blocks(sequence.block_sequence, sequence.tokens[:count], sequence.request.salt)
            sequence.num_cached = count

    def _release(self, sequence: Sequence) -> None:
        if sequence.block_sequence is None:
            return
        computed = min(sequence.num_computed, len(sequence.tokens))
        if self.prefix_caching and sequence.state is State.RUNNING and computed >= self.manager.block_size:
            self._cache(sequence, computed)
        self.manager.free(sequence.block_sequence)
        sequence.block_sequence, sequence.num_cached = None, 0
        if not sequence.forked and sequence.request.beam is None:
            self._reserved_seats -= sequence.request.width - 1
