"""Where two results differ that should have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return whether two tensors have the same bits, as a scalar on their device.

    Reading it waits for the device, which then comes to rest.
    """
    return ~_differing(a, b).any()


def describe(found: Tensor, expected: Tensor) -> str:
    """Say how many elements differ, in which range of each dimension, and by how much at most.

    Faults of kernels have shapes: rows of a warp, columns of a TMA store, a block of keys, a part.
    """
    places = _differing(found, expected).nonzero()
    if not len(places):
        return "the same bits"
    ranges = ", ".join(
        f"{len(axis.unique())} of [{int(axis.min())}, {int(axis.max())}]" for axis in places.unbind(1)
    )
    a, b = (t[tuple(places.T)].double() for t in (found, expected))
    largest = (a - b).abs().nan_to_num(-1).max()
    return (
        f"{len(places)} of {found.numel()} elements of {tuple(found.shape)} differ, at indices {ranges}; "
        f"{int(a.isnan().sum())} are NaN, others differ by up to {float(largest):.3g} "
        f"(largest element: {float(expected.double().abs().max()):.3g})"
    )


def _differing(a: Tensor, b: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(integers) != b.contiguous().view(integers)
