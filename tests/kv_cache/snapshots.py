"""Everything that a manager knows, as plain values, to see whether an operation has changed it."""

from __future__ import annotations

import copy
import pickle
from array import array
from typing import Any

import torch
from torch import Tensor

from flashtile.kv_cache import BlockManager

COPIES = (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original)))
"""Ways to a copy that is independent."""


def snapshot(manager: BlockManager) -> Any:
    """Every attribute of the pools and of the table, and a cache's tensors."""
    parts = [manager.pool, manager.host_pool, manager.table]
    tensors = [value for value in vars(manager).values() if isinstance(value, Tensor)]
    return [_plain(part.__getstate__()) for part in parts], [_plain(tensor) for tensor in tensors]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.contiguous().view(torch.uint8).cpu().numpy().tobytes()  # NaN equals itself
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items() if key != "owner"]  # a copy's differs
    return list(value) if isinstance(value, array | list) else value
