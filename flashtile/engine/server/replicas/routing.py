"""Routing of a call to the replica that has computed the same prefix, unless that replica is too busy."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from flashtile.engine.server.replicas.process import Replica

PIECE = 256
"""Number of bytes of the prompt's JSON text in a piece. Prefixes are compared in whole pieces."""
SLACK = 8
"""A replica that knows the prefix is chosen if it has at most this many calls more than the replica with the
fewest calls."""
REMEMBERED = 2**16
"""Number of remembered prefixes; the least recently used ones are dropped."""


class Routing:
    """Chooses replicas, and remembers which replica computed each prefix.

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
        self._replica_of_prefix: OrderedDict[bytes, Replica] = OrderedDict()

    def choose(self, replicas: Sequence[Replica], prompt: bytes) -> Replica | None:
        """Return the replica for a prompt, or None if no replica accepts calls."""
        up = [replica for replica in replicas if replica.is_up]
        if not up:
            return None
        idlest = min(up, key=lambda replica: replica.in_flight)
        prefixes = _prefixes(prompt)
        known = (self._replica_of_prefix.get(one) for one in reversed(prefixes))
        preferred = next((found for found in known if any(found is replica for replica in up)), None)
        chosen = idlest if preferred is None or preferred.in_flight > idlest.in_flight + SLACK else preferred
        for one in prefixes:
            self._replica_of_prefix[one] = chosen
            self._replica_of_prefix.move_to_end(one)
        while len(self._replica_of_prefix) > REMEMBERED:
            self._replica_of_prefix.popitem(last=False)
        return chosen


def busiest(replicas: Sequence[Replica], prompt: bytes) -> Replica | None:
    """Return the replica with the most calls for any prompt, or None if no replica accepts calls."""
    return max((one for one in replicas if one.is_up), key=lambda one: one.in_flight, default=None)


def prompt_of(head: bytes) -> bytes:
    """Return the part of ``head``, the first bytes of a body, that begins at the prompt or the messages.

    Returns b"" if ``head`` has neither. The JSON is not parsed: equal prompts usually have equal bytes. If
    their bytes differ, for example in escapes, the chosen replica may not have the prefix in its cache.
    """
    starts = [start for name in (b'"messages"', b'"prompt"') if (start := head.find(name)) >= 0]
    return head[min(starts) :] if starts else b""


def _prefixes(prompt: bytes) -> list[bytes]:
    """Return the hashes of those prefixes of ``prompt`` that consist of whole pieces, the shortest first."""
    found, state = [], hashlib.blake2b(digest_size=16)
    for end in range(PIECE, len(prompt) + 1, PIECE):
        state.update(prompt[end - PIECE : end])
        found.append(state.digest())
    return found
