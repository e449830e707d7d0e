"""Which replica a call goes to: where its beginning was computed, unless that one has too much to do."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

PIECE = 256
"""Bytes of a prompt, as it is written, that are looked up together."""
SLACK = 8
"""Calls that a replica may have more than the idlest one before others take what it has the beginning of."""
REMEMBERED = 2**16
"""Beginnings, the most recently used ones."""


class Place(Protocol):
    """A replica, as far as choosing goes: calls that it answers now, and whether it takes another."""

    in_flight: int

    @property
    def is_up(self) -> bool: ...


AnyPlace = TypeVar("AnyPlace", bound=Place)


class Routing:
    """Remembers where the beginnings of prompts went.

    Examples:
        >>> from types import SimpleNamespace
        >>> one, two = (SimpleNamespace(in_flight=0, is_up=True) for _ in "12")
        >>> routing, story, other = Routing(), prompt_of(b'{"prompt": "...') * 100, b"something else"
        >>> first = routing.choose([one, two], story)
        >>> first.in_flight += 1
        >>> routing.choose([one, two], other) is first, routing.choose([one, two], story + b"?") is first
        (False, True)
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, Any] = OrderedDict()

    def choose(self, places: Sequence[AnyPlace], prompt: bytes) -> AnyPlace | None:
        """The replica for a prompt; None if none takes calls."""
        up = [place for place in places if place.is_up]
        if not up:
            return None
        idlest = min(up, key=lambda place: place.in_flight)
        beginnings = _beginnings(prompt)
        homes = (self._homes.get(one) for one in reversed(beginnings))
        home = next((found for found in homes if any(found is place for place in up)), None)
        chosen = idlest if home is None or home.in_flight > idlest.in_flight + SLACK else home
        for one in beginnings:
            self._homes[one] = chosen
            self._homes.move_to_end(one)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        assert chosen is not None
        return chosen


def prompt_of(head: bytes) -> bytes:
    """What the prompt of a call begins with, from the first bytes of its body, which are not parsed.

    A client writes the same prompt in the same way each time. Where a body begins otherwise than clients
    write it, only the choice of a replica is worse.
    """
    starts = [start for name in (b'"messages"', b'"prompt"') if (start := head.find(name)) >= 0]
    return head[min(starts) :] if starts else b""


def _beginnings(prompt: bytes) -> list[bytes]:
    """A hash of each of the prompt's beginnings of whole pieces, the shortest first."""
    found, state = [], hashlib.blake2b(digest_size=16)
    for end in range(PIECE, len(prompt) + 1, PIECE):
        state.update(prompt[end - PIECE : end])
        found.append(state.digest())
    return found
