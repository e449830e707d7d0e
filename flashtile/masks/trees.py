"""Block masks of packed segments that share prefixes, such as several answers to one prompt.

In depth-first order, the descendants of a segment follow it directly. Let ``place`` be a token's position in
this order, and ``end`` the position that follows the last descendant of its segment. A query then sees a key
if ``place[key] <= place[query] < end[key]``. The two tensors describe any forest. They are indexed by a
token's position in memory, so segments may be packed in any order, and no token is moved. A window is counted
by a third tensor, the token's position in its own path.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import as_device, as_int_within, check_dense, check_dtype
from flashtile.checks.values import check_between, check_offset_values
from flashtile.masks.block_mask import BlockMask, as_length, block_mask_of, block_sizes
from flashtile.masks.mods import MaskMod
from flashtile.problems.common import MAX_LENGTH, UNLIMITED
from flashtile.torch_private import detect_fake_mode

_TRACED_ROUNDS = 16
"""Rounds of doubling in a graph of torch.compile. They are enough for any forest less than 2^16 deep."""


def create_tree_mask(
    cu_seqlens: Tensor,
    parent: Tensor,
    total: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    window_left: int = UNLIMITED,
) -> BlockMask:
    """Create the block mask of packed segments. Each segment continues another one or is a root.

    A token sees all tokens of its segment's ancestors, and its own segment causally. Segments may be packed
    in any order. The mask serves all layers of a step, for q, k and v of shape (1, total, heads, head_dim).

    Whether a block is skipped, partial or full follows from the segments, so no score is evaluated. The host
    does not wait for a GPU. The values of ``cu_seqlens`` and ``parent`` are checked if both are on the CPU,
    otherwise only with ``FLASHTILE_DEBUG=1``.

    Args:
        cu_seqlens: (segments + 1,) int32 or int64 offsets: segment i is tokens ``cu_seqlens[i]`` to
            ``cu_seqlens[i + 1]``, and may be empty. Tokens after the last offset see nothing and are not
            seen.
        parent: (segments,) int32 or int64: for each segment, the index of the segment that it continues, or
            -1 for a root. It may be on another device than ``cu_seqlens``.
        total: number of tokens of q, k and v.
        device: device of the mask. None: the device of ``cu_seqlens``.
        BLOCK_SIZE: as for :func:`create_block_mask`.
        window_left: hides keys that are more than ``window_left`` tokens before the query in its path from
            the root. -1: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes do not match, offsets decrease or end after ``total``, a parent is not a segment,
            or a segment descends from itself.

    Examples:
        >>> from flashtile import masks
        >>> cu_seqlens = torch.tensor([0, 2, 4, 5])  # a prompt of two tokens, answers of two and one
        >>> mask = masks.create_tree_mask(cu_seqlens, torch.tensor([-1, 0, 0]), 5)
        >>> mask.mask_mod(0, 0, torch.arange(5)[:, None], torch.arange(5)).int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    """
    for name, tensor in (("cu_seqlens", cu_seqlens), ("parent", parent)):
        check_dense(name, tensor)
        check_dtype(name, tensor, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (segments + 1,), got {tuple(cu_seqlens.shape)}")
    segments = cu_seqlens.shape[0] - 1
    if parent.dim() != 1 or parent.shape[0] != segments:
        raise ValueError(
            f"parent must have shape (segments,) = ({segments},), one less than cu_seqlens, got "
            f"{tuple(parent.shape)}"
        )
    total, sizes = as_length("total", total), block_sizes(BLOCK_SIZE)
    window_left = as_int_within("window_left", window_left, UNLIMITED, MAX_LENGTH)
    device = cu_seqlens.device if device is None else as_device("device", device)
    for name, tensor in (("cu_seqlens", cu_seqlens), ("parent", parent)):
        if tensor.is_meta and device.type != "meta":
            raise ValueError(f"{name} must be on {device} or on the CPU, got a tensor on meta")
    cu_seqlens, parent = cu_seqlens.long().contiguous(), parent.long()
    if not cu_seqlens.device.type == parent.device.type == "cpu":
        cu_seqlens, parent = _moved(cu_seqlens, device), _moved(parent, device)
    compiling = torch.compiler.is_compiling()
    debug = os.environ.get("FLASHTILE_DEBUG", "0") == "1"
    checked = type(cu_seqlens) is type(parent) is Tensor and not compiling  # a fake tensor has no values
    checked = checked and (debug or cu_seqlens.device.type == "cpu")
    checked = checked and detect_fake_mode() is None  # in which results of real tensors are fake
    if checked:
        check_offset_values("cu_seqlens", cu_seqlens, total, MAX_LENGTH)
        check_between("parent", parent, -1, segments - 1, "the last segment")
    rounds = _TRACED_ROUNDS if compiling else max(segments - 1, 0).bit_length()
    start, stop, depth, top = _depth_first(cu_seqlens, parent, rounds)
    if checked and bool((top < segments).any()):
        i = int((top < segments).nonzero()[0])
        raise ValueError(f"parent must lead from every segment to a root (-1), got a cycle above segment {i}")

    # One element more than tokens, because a captured tensor must not be empty.
    token = torch.arange(total + 1, device=device)
    of_segments = torch.stack((start - cu_seqlens[:-1], stop, depth - cu_seqlens[:-1]))
    of_segments = torch.nn.functional.pad(of_segments, (0, 1))
    segment = torch.searchsorted(_moved(cu_seqlens[1:], device), token, right=True)
    shift, end, shift_in_path = _moved(of_segments, device)[:, segment]
    place, end = (token + shift).int(), end.int()
    (first_q, last_q), (first_k, last_k) = (_extremes(place[:total], size) for size in sizes)
    first_end, last_end = _extremes(end[:total], sizes[1])
    some = (last_q[:, None] >= first_k) & (first_q[:, None] < last_end)
    every = (first_q[:, None] >= last_k) & (last_q[:, None] < first_end)
    mod = tree_mod(place, end)
    if window_left != UNLIMITED:
        position = (token + shift_in_path).int()
        (first_q, last_q), (first_k, last_k) = (_extremes(position[:total], size) for size in sizes)
        some &= first_q[:, None] - last_k <= window_left
        every &= last_q[:, None] - first_k <= window_left
        mod &= path_window_mod(position, window_left)
    return block_mask_of(some[None, None], every[None, None], (total, total), sizes, mod)


def tree_mod(place: Tensor, end: Tensor) -> MaskMod:
    """Return the mask function: a query sees a key if ``place[key] <= place[query] < end[key]``."""

    def tree(batch, head, q_idx, kv_idx):
        own = place[q_idx]
        return (place[kv_idx] <= own) & (own < end[kv_idx])

    mask = MaskMod(tree)
    mask.recipe = tree_mod, (place, end)
    return mask


def path_window_mod(position: Tensor, window_left: int) -> MaskMod:
    """Return the mask function: no key is more than ``window_left`` positions before a query that sees it."""

    def path_window(batch, head, q_idx, kv_idx):
        return position[q_idx] - position[kv_idx] <= window_left

    mask = MaskMod(path_window)
    mask.recipe = path_window_mod, (position, window_left)
    return mask


def _depth_first(cu_seqlens: Tensor, parent: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (start, stop, depth, ancestor) of the segments, each (segments,) int64.

    ``start`` is the position of a segment's first token in depth-first order, in which siblings keep their
    packed order. ``stop`` is the position that follows its last descendant. ``depth`` is the number of tokens
    of all ancestors. ``ancestor`` is the index of the segment 2^rounds generations above, or the number of
    segments if there is none.

    ``stop`` sums the lengths of descendants, ``start`` the distances from each ancestor's start to that of
    its child, and ``depth`` the lengths of ancestors. All are summed by doubling: round r adds the
    generations 2^r to 2^(r + 1) - 1 away.

    Args:
        rounds: 2^rounds must exceed the depth of the forest.
    """
    segments = parent.shape[0]
    # The parent of all roots is one additional segment without tokens.
    root = torch.arange(segments + 1, device=parent.device)[segments:]
    up = torch.cat((torch.where(parent < 0, root, parent.minimum(root)), root))
    lengths = torch.nn.functional.pad(cu_seqlens.diff(), (0, 1))
    subtree, ancestors = lengths, [up]
    for _ in range(rounds):
        above = ancestors[-1]
        subtree = subtree + torch.zeros_like(subtree).index_add(0, above, subtree)
        ancestors.append(above[above])
    parents, order = up[:segments].sort(stable=True)
    of_siblings = subtree[order]
    before = of_siblings.cumsum(0) - of_siblings
    before = before - before[torch.searchsorted(parents, parents)]
    depth = lengths[up]
    from_root = torch.stack((depth.scatter_add(0, order, before), depth))
    for above in ancestors[:-1]:
        from_root = from_root + from_root[:, above]
    start, depth = from_root[:, :segments]
    return start, start + subtree[:segments], depth, ancestors[-1][:segments]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``. The host does not wait for a copy to a GPU."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _extremes(values: Tensor, size: int) -> Any:
    """Return the smallest and the largest value in each block of ``size`` values, (blocks,) each."""
    blocks = -(-values.shape[0] // size)
    index = torch.arange(blocks * size, device=values.device).clamp(max=values.shape[0] - 1)
    return values[index].view(blocks, size).aminmax(dim=1)
