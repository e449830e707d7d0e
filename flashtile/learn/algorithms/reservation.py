"""Memory for sequences that grow: one contiguous region for each, or pages.

Section 2 and Figure 2 of PagedAttention (Kwon et al. 2023, arXiv:2309.06180). The length of an answer is not
known in advance. Contiguous regions must be reserved for the longest possible answer, which loses memory in
three ways:

    reserved    for tokens of this request that will come, but are not here yet
    never used  room beyond the length that the answer turns out to have (internal fragmentation)
    too small   free regions between others, too small for a waiting request (external fragmentation)

With pages, a sequence takes any free page when it needs one. Only the rest of its last page is held without
being used. The pages are those of :class:`flashtile.kv_cache.BlockManager`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.kv_cache import BlockManager, CacheFullError
from flashtile.learn.algorithms.trace import Event, Trace

LONGEST = 2048
"""Longest sequence, in tokens, of models of 2022 (OPT, LLaMA)."""


class Request(NamedTuple):
    """Number of tokens of a prompt and of its answer."""

    prompt: int
    output: int

    @property
    def final(self) -> int:
        return self.prompt + self.output


def random_requests(
    count: int, seed: int = 0, mean_prompt: float = 161, mean_output: float = 338, longest: int = LONGEST
) -> list[Request]:
    """Return requests with exponentially distributed lengths.

    The default means are those of ShareGPT in the PagedAttention paper (section 6.1).

    Examples:
        >>> from flashtile.algorithms import reservation
        >>> requests = reservation.random_requests(100, seed=1)
        >>> all(request.final <= 2048 for request in requests)
        True
    """
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = min(1 + int(draw.expovariate(1 / mean_prompt)), longest - 1)
        requests.append(Request(prompt, min(1 + int(draw.expovariate(1 / mean_output)), longest - prompt)))
    return requests


class Contiguous:
    """A contiguous region for each sequence, at the lowest address where it fits.

    Args:
        slots: capacity in tokens.
        reserve: function that returns the number of slots to reserve for a request.

    Raises:
        ValueError: ``reserve`` gives a request fewer slots than its tokens need.
    """

    def __init__(self, slots: int, reserve: Callable[[Request], int]):
        self.slots, self.reserve = slots, reserve
        self.regions: dict[int, range] = {}

    def admit(self, number: int, request: Request) -> bool:
        """Allocate room for the prompt of a request and return True, or change nothing and return False."""
        size, start = self.reserve(request), 0
        if size < request.final:
            raise ValueError(f"reserve must give {request} at least {request.final} slots, got {size}")
        for region in sorted(self.regions.values(), key=lambda region: region.start):
            if start + size <= region.start:
                break
            start = region.stop
        if start + size > self.slots:
            return False
        self.regions[number] = range(start, start + size)
        return True

    def grow(self, number: int) -> bool:
        """Make room for one more token of a sequence. Return False if there is no room."""
        return True

    def free(self, number: int) -> None:
        """Free the memory of a sequence."""
        del self.regions[number]

    def held(self, number: int) -> int:
        """Number of tokens that a sequence's memory has room for, used or not."""
        return len(self.regions[number])

    def places(self, number: int) -> list[int]:
        """Return where a sequence is, for drawing: [first slot, number of slots]."""
        return [self.regions[number].start, len(self.regions[number])]


def for_the_longest(request: Request) -> int:
    """Reserve room for the longest possible sequence."""
    return LONGEST


def to_a_power_of_two(request: Request) -> int:
    """Reserve the prompt's length, plus the output's length rounded up to a power of two.

    A server does not know the output's length in advance. This function assumes that the length can be
    predicted within a factor of two.
    """
    return min(request.prompt + (1 << (request.output - 1).bit_length()), LONGEST)


class Pages:
    """Pages of :class:`flashtile.kv_cache.BlockManager`, allocated one at a time.

    The methods are those of :class:`Contiguous`; ``places`` returns the pages of a sequence.

    Args:
        slots: capacity in tokens; the pool has ``slots // page_size`` pages.
        page_size: tokens in a page.
        spare: share of the pages that admission leaves free, for sequences that grow.
    """

    def __init__(self, slots: int, page_size: int = 16, spare: float = 0.01):
        self.slots, self.spare = slots, spare
        num_blocks = slots // page_size
        self.manager = BlockManager(num_blocks, page_size, max_sequences=num_blocks, max_seqlen=LONGEST)
        self.sequences: dict[int, int] = {}

    def admit(self, number: int, request: Request) -> bool:
        manager = self.manager
        needed = -(-request.prompt // manager.block_size)
        available = manager.usage().available_blocks
        if needed > available - int(self.spare * manager.pool.num_blocks):
            return False
        self.sequences[number] = manager.create()
        manager.reserve(self.sequences[number], request.prompt)
        return True

    def grow(self, number: int) -> bool:
        try:
            self.manager.reserve(self.sequences[number])
        except CacheFullError:
            return False
        return True

    def free(self, number: int) -> None:
        self.manager.free(self.sequences.pop(number))

    def held(self, number: int) -> int:
        return len(self.manager.blocks(self.sequences[number])) * self.manager.block_size

    def places(self, number: int) -> list[int]:
        return self.manager.blocks(self.sequences[number])


Room = Contiguous | Pages
"""Memory for the tokens of sequences; ``slots`` is its capacity in tokens."""


@dataclass
class Served:
    """Statistics of a workload in one memory.

    Averages are over the steps in which a request waited, or over all steps if none ever waited.

    Attributes:
        steps: decoding steps until all requests were answered.
        crowded: number of steps in which a request waited.
        sequences: average number of sequences at a time.
        waste: share of the allocated memory that holds no token.
        reserved, never_used: share of the allocated memory that tokens will fill later, and share that stays
            unused to the end; their sum is ``waste``.
        unusable: share of all memory that is free although a request waits.
        preempted: number of preemptions, after which a sequence is computed again.
        most_sequences: largest number of sequences at a time.
    """

    steps: int = 0
    crowded: int = 0
    sequences: float = 0.0
    waste: float = 0.0
    reserved: float = 0.0
    never_used: float = 0.0
    unusable: float = 0.0
    preempted: int = 0
    most_sequences: int = 0


def serve(requests: Iterable[Request], room: Room, trace: Trace | None = None, every: int = 32) -> Served:
    """Simulate a server that answers all requests, first come, first served; return its statistics.

    Each step adds a token to every running sequence.

    Args:
        requests: requests that all arrive at the start.
        room: memory that holds the tokens of the running sequences. If a sequence cannot grow, the sequence
            that came last is preempted. It loses its memory and waits at the head of the queue; its tokens so
            far become its prompt.
        trace: gets an event of kind "page" every ``every`` steps, with the places of all sequences in memory.

    Raises:
        ValueError: a request does not fit into the empty memory.

    Examples:
        >>> from flashtile.algorithms import reservation
        >>> requests = reservation.random_requests(64)
        >>> whole = reservation.serve(requests, reservation.Contiguous(16384, reservation.for_the_longest))
        >>> pages = reservation.serve(requests, reservation.Pages(16384))
        >>> whole.waste > 0.6, pages.waste < 0.04, pages.sequences > 3 * whole.sequences
        (True, True, True)
    """
    waiting = deque(enumerate(requests))
    final = {number: request.final for number, request in waiting}
    tokens: dict[int, int] = {}
    sums: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # by whether a request waits
    served = Served()
    while waiting or tokens:
        while waiting and room.admit(*waiting[0]):
            number, request = waiting.popleft()
            tokens[number] = request.prompt
        if not tokens:
            raise ValueError(f"requests must fit into {room.slots} slots, got one of {waiting[0][1]}")
        served.most_sequences = max(served.most_sequences, len(tokens))
        sums[bool(waiting)] += _held(room, tokens, final)
        if trace is not None and served.steps % every == 0:
            _record(trace, served.steps, room, tokens, final, len(waiting))
        for number in list(tokens):
            if number not in tokens:
                continue  # preempted earlier in this step
            while not room.grow(number):
                last = max(tokens)
                room.free(last)
                length = tokens.pop(last)
                waiting.appendleft((last, Request(length, final[last] - length)))
                served.preempted += 1
                if last == number:
                    break
            else:
                tokens[number] += 1
                if tokens[number] == final[number]:
                    room.free(number)
                    del tokens[number]
        served.steps += 1
    served.crowded = sums[True]["steps"]
    total = sums[True] or sums[False]
    if total:
        served.sequences = total["sequences"] / total["steps"]
        served.reserved, served.never_used = total["reserved"] / total["held"], total["never"] / total["held"]
        served.waste = served.reserved + served.never_used
        served.unusable = 1 - total["held"] / (total["steps"] * room.slots)
    return served


def _held(room: Room, tokens: dict[int, int], final: dict[int, int]) -> Counter[str]:
    """Count the sequences of one step, the slots that they hold, and the held slots that have no token.

    Held slots without a token count as "reserved" if a token will fill them, and as "never" otherwise.
    """
    step = Counter(steps=1, sequences=len(tokens))
    for number, length in tokens.items():
        held, to_come = room.held(number), final[number] - length
        step["held"] += held
        step["reserved"] += min(to_come, held - length)
        step["never"] += max(held - length - to_come, 0)
    return step


def _record(
    trace: Trace, step: int, room: Room, tokens: dict[int, int], final: dict[int, int], waiting: int
) -> None:
    sequences = [[number, length, final[number], *room.places(number)] for number, length in tokens.items()]
    data: dict[str, Any] = {"op": "pool", "step": step, "waiting": waiting, "sequences": sequences}
    data["used"], data["held"] = sum(tokens.values()), sum(map(room.held, tokens))
    trace.events.append(Event("page", "pool", data=data))
