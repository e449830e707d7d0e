"""A cache bounded in bytes of host memory, and which tensors a cache may hold."""

from __future__ import annotations

import random
from collections.abc import Hashable
from threading import Lock
from typing import Any, NoReturn

from torch import Tensor

from flashtile.torch_private import is_wrapped_by_transform


def outlives_modes(tensor: Tensor) -> bool:
    """Whether a new tensor can be used after the modes end in which it was made, and so may be cached.

    Tensors made in inference mode cannot be saved for a backward pass. Those made under a FakeTensorMode, or
    another mode whose results have types of their own, and under transforms of ``torch.func`` have no data.
    """
    return type(tensor) is Tensor and not is_wrapped_by_transform(tensor) and not tensor.is_inference()


class BoundedCache(dict[Any, Any]):
    """A dict whose values take at most ``limit_bytes`` of host memory, by the sizes that callers state.

    Reads are those of ``dict``; :meth:`store` adds entries. When a new entry does not fit, others chosen at
    random are dropped, one at a time, until it does. If the cache holds n entries, a loop over n + 1 keys
    therefore misses about twice per round. With a policy that drops the oldest entry or all entries, the same
    loop would miss nearly always.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Total of all entries."""
        self._keys: list[Hashable] = []
        self._bytes: dict[Hashable, int] = {}
        self._random = random.Random(0)
        self._lock = Lock()

    def store(self, key: Hashable, value: Any, nbytes: int) -> Any:
        """Store ``value``, which takes ``nbytes`` (at least 0), and return it.

        A value larger than ``limit_bytes`` is returned without being stored.
        """
        if nbytes > self.limit_bytes:
            return value
        dropped = []  # freed after the lock, because freeing a value may run any code
        with self._lock:
            if key in self:
                dropped.append(super().__getitem__(key))
                self.held_bytes -= self._bytes[key]
            else:
                self._keys.append(key)
            self.held_bytes += nbytes
            while self.held_bytes > self.limit_bytes:
                dropped.append(self._drop_one_but(key))
            self._bytes[key] = nbytes
            super().__setitem__(key, value)
        return value

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            dropped = [*self.values()]  # freed after the lock, as in store()
            super().clear()
            self._keys.clear()
            self._bytes.clear()
            self.held_bytes = 0
        del dropped

    def __setitem__(self, key: Hashable, value: Any) -> NoReturn:
        raise TypeError("entries of a BoundedCache are added by store(key, value, nbytes)")

    def _drop_one_but(self, kept: Hashable) -> Any:
        keys = self._keys
        place = int(self._random.random() * len(keys))
        if keys[place] == kept:  # take another key; there is one, because ``kept`` alone is within the limit
            place = place - 1 if place else 1
        key = keys[place]
        keys[place] = keys[-1]
        keys.pop()
        self.held_bytes -= self._bytes.pop(key)
        return super().pop(key)
