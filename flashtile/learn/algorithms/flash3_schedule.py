"""FlashAttention-3's schedule: when each unit of a multiprocessor works, and for which warpgroup.

arXiv:2407.08608, section 3, Figures 1 and 2. Three units work at the same time: TMA loads, tensor cores
multiply, and the rest of the multiprocessor computes softmaxes. Each unit executes one operation at a time,
in the sequence that the barriers between the warpgroups impose. An operation starts when its unit is free and
its inputs are ready. The queues of the units define the schedule, and all times follow from them.

The unit of time is a product, Q K^T or P V. On an H100 with head_dim 128 a softmax takes about as long: exp
has 1/256 of the tensor cores' throughput, and the two products have 512 operations per exp (section 3.1), so
the exps take half as long as both products.
Executed one after the other, softmaxes would take a third of the time; overlapped with products, they cost
nothing. In this ideal model, ping-pong alone hides the softmaxes of two warpgroups, and pipelining alone
those of one. On a GPU the turns are less regular, and the paper's kernel gains from both techniques
(Table 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashtile.learn.algorithms.trace import Span

TMA, TENSOR_CORE, SOFTMAX = "TMA", "tensor core", "softmax"
PRODUCER = "producer"


class Wait(NamedTuple):
    """A time in which a worker has nothing to do, because its next operation waits for another worker.

    ``unit`` is the unit of the operation that waits. ``barrier`` is "full" (a block of K or V has to arrive),
    "empty" (a stage has to be free) or "turn" (another warpgroup comes first). ``cause`` is the operation
    whose end opens the barrier.
    """

    worker: str
    unit: str
    barrier: str
    start: float
    end: float
    cause: Order


class Order(NamedTuple):
    """An operation that a worker issues for one block of keys.

    ``label`` is "K" or "V" for a load by the producer, and "S", "softmax" or "P V" for a warpgroup.
    """

    worker: str
    label: str
    block: int


def schedule(
    num_blocks: int,
    *,
    warpgroups: int = 2,
    pingpong: bool = True,
    pipelined: bool = True,
    stages: int = 2,
    product: float = 1.0,
    softmax: float = 1.0,
    load: float = 0.5,
) -> list[Span]:
    """Return the timeline of a thread block that attends to ``num_blocks`` blocks of keys, ordered by start.

    Args:
        warpgroups: number of consumer warpgroups. All have the same number of rows.
        pingpong: whether the warpgroups take turns at the tensor cores, as FlashAttention-3's barriers make
            them do. If not, all warpgroups run the same operation and wait for each other. This is the worst
            case of a kernel without these barriers.
        pipelined: whether a warpgroup issues S of the next block before P V of this one, and computes the
            next softmax while P V runs. If not, it waits for each operation before it issues another.
        stages: number of blocks of K, and number of blocks of V, that fit into the buffers in SRAM.
        product, softmax, load: duration of each operation, for one warpgroup and one block.

    Raises:
        ValueError: ``warpgroups`` or ``stages`` is below 1.

    Examples:
        >>> from flashtile.algorithms import flash3_schedule
        >>> spans = flash3_schedule.schedule(8)
        >>> alone = flash3_schedule.schedule(8, pingpong=False, pipelined=False)
        >>> max(span.end for span in spans) < max(span.end for span in alone)
        True
    """
    return timeline(
        num_blocks, warpgroups=warpgroups, pingpong=pingpong, pipelined=pipelined, stages=stages,
        product=product, softmax=softmax, load=load,
    )[0]  # fmt: skip


def timeline(
    num_blocks: int,
    *,
    warpgroups: int = 2,
    pingpong: bool = True,
    pipelined: bool = True,
    stages: int = 2,
    product: float = 1.0,
    softmax: float = 1.0,
    load: float = 0.5,
) -> tuple[list[Span], list[Wait]]:
    """Return the spans of :func:`schedule`, whose arguments these are, and what each worker waits for.

    Examples:
        >>> from flashtile.algorithms import flash3_schedule
        >>> _, waits = flash3_schedule.timeline(4)
        >>> first = waits[0]
        >>> first.worker, first.barrier, first.cause.label, first.end  # S waits for the first block of K
        ('warpgroup 0', 'full', 'K', 0.5)
    """
    if warpgroups < 1 or stages < 1:
        raise ValueError(f"warpgroups and stages must be at least 1, got {warpgroups} and {stages}")
    consumers = [f"warpgroup {w}" for w in range(warpgroups)]
    queues = {
        TMA: [Order(PRODUCER, label, j) for j in range(num_blocks) for label in ("K", "V")],
        TENSOR_CORE: list(products(num_blocks, consumers, pingpong, pipelined)),
        SOFTMAX: [Order(w, "softmax", j) for j in range(num_blocks) for w in consumers],
    }
    duration = {TMA: load, TENSOR_CORE: product, SOFTMAX: softmax}
    ends: dict[Order, float] = {}
    last: dict[str, Order] = {}  # of each unit
    spans, waits = [], []
    idle_since = dict.fromkeys([PRODUCER, *consumers], 0.0)
    while any(queues.values()):
        for unit, queue in queues.items():
            while queue and all(n in ends for n in needs(queue[0], consumers, pingpong, pipelined, stages)):
                order = queue.pop(0)
                before = needs(order, consumers, pingpong, pipelined, stages)
                if unit in last:
                    before.append(last[unit])
                cause = max(before, key=lambda n: ends[n], default=None)
                start = ends[cause] if cause else 0.0
                ends[order] = start + duration[unit]
                spans.append(Span(order.worker, unit, order.label, order.block, start, ends[order]))
                since = idle_since[order.worker]
                if cause and cause.worker != order.worker and since < start:
                    waits.append(Wait(order.worker, unit, _barrier(order, cause), since, start, cause))
                idle_since[order.worker] = max(since, ends[order])
                last[unit] = order
    return sorted(spans, key=lambda span: (span.start, span.unit)), sorted(waits, key=lambda wait: wait.start)


def _barrier(order: Order, cause: Order) -> str:
    if order.worker == PRODUCER:
        return "empty"
    return "full" if cause.worker == PRODUCER else "turn"


def products(num_blocks: int, consumers: list[str], pingpong: bool, pipelined: bool) -> Iterator[Order]:
    """Yield the products S and P V of all blocks in the order in which the tensor cores execute them.

    With ``pipelined``, S of a block comes before P V of the previous block. With ``pingpong``, both products
    of one warpgroup come before those of the next warpgroup.
    """
    for j in range(num_blocks + 1):
        turn = [("S", j), ("P V", j - 1)] if pipelined else [("P V", j - 1), ("S", j)]
        turn = [(label, block) for label, block in turn if 0 <= block < num_blocks]
        if pingpong:
            yield from (Order(w, *entry) for w in consumers for entry in turn)
        else:
            yield from (Order(w, *entry) for entry in turn for w in consumers)


def needs(order: Order, consumers: list[str], pingpong: bool, pipelined: bool, stages: int) -> list[Order]:
    """Return the operations that must end before the operation ``order`` can start.

    In addition, the unit that executes ``order`` must be free.
    """
    worker, label, j = order
    if worker == PRODUCER:  # a stage is free when all consumers have used its block
        user = {"K": "S", "V": "P V"}[label]
        return [Order(w, user, j - stages) for w in consumers if j >= stages]
    those_who_wait = [worker] if pingpong else consumers
    if label == "softmax":
        return [Order(w, "S", j) for w in those_who_wait]
    if label == "P V":
        return [Order(PRODUCER, "V", j), *(Order(w, "softmax", j) for w in those_who_wait)]
    before = "softmax" if pipelined else "P V"
    return [Order(PRODUCER, "K", j), *(Order(w, before, j - 1) for w in those_who_wait if j > 0)]


def busy(spans: list[Span], unit: str) -> float:
    """Return the fraction of the total time during which a unit works; 0 if there are no spans."""
    total = max((span.end for span in spans), default=0.0)
    return sum(span.end - span.start for span in spans if span.unit == unit) / total if total else 0.0
