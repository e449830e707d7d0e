"""Groups of sequences that share blocks, in Python: what the kernels find, and a launch in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.portable.decode.groups import GroupLaunch


def expected_groups(
    table: list, lengths: list, starts: list, size: int, most: int, least: int
) -> list[tuple[int, int, int]]:
    """The (first, end, keys) of all groups, by trying every threshold."""
    full = [max(0, lengths[i] - starts[i + 1] + starts[i]) // size for i in range(len(lengths))]

    def common(i: int) -> int:
        limit = min(full[i - 1 : i + 1])
        different = (at for at in range(limit) if table[i][at] != table[i - 1][at])
        return size * next(different, limit)

    depths = [0, *(common(i) for i in range(1, len(lengths)))]
    saved, threshold = max((depth * sum(one >= depth for one in depths), depth) for depth in depths)
    ranges: list[list[int]] = []
    for i, depth in enumerate(depths):
        if saved >= least and i and depth >= threshold and len(ranges[-1]) < most:
            ranges[-1].append(i)
        else:
            ranges.append([i])
    return [(r[0], r[-1] + 1, min((depths[i] for i in r[1:]), default=0)) for r in ranges]


class GroupsInPython:
    """Takes the place of :class:`GroupLaunch`, which has tensors on a GPU only."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, *tensors: Tensor) -> None:
        if tensors[0].is_cuda:
            return GroupLaunch(*self.sizes)(*tensors)
        table, lengths, starts = (tensor.tolist() for tensor in tensors[:3])
        offsets, shared = [], []
        for first, end, keys in expected_groups(table, lengths, starts, *self.sizes[3:]):
            offsets += [starts[first], *[starts[end]] * (end - first - 1)]
            shared += [keys] * (end - first)
        for target, numbers in zip(tensors[4:], ([*offsets, starts[-1]], shared), strict=True):
            target[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
