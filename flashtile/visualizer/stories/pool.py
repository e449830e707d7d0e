"""One workload in three memories of the same size: whole reservations, guessed ones, and pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from flashtile.algorithms import Trace, reservation
from flashtile.visualizer.stories.case import Case

SLOTS, PAGE_SIZE, REQUESTS = 15728, 16, 96
"""Room for LLaMA-13B's keys and values in 12 GB, at 800 KiB a token (PagedAttention, section 1)."""


def cases() -> Iterator[Case]:
    rooms: dict[str, reservation.Room] = {
        "longest": reservation.Contiguous(SLOTS, reservation.for_the_longest),
        "power": reservation.Contiguous(SLOTS, reservation.to_a_power_of_two),
        "pages": reservation.Pages(SLOTS, PAGE_SIZE),
    }
    for name, room in rooms.items():
        trace = Trace()
        served = reservation.serve(reservation.random_requests(REQUESTS), room, trace)
        facts = {**asdict(served), "slots": SLOTS, "page_size": PAGE_SIZE, "paged": name == "pages"}
        yield Case(name, trace, facts)
