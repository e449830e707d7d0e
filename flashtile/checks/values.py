"""Checks of values: lengths, offsets, block tables, and positions that are written twice.

These checks read from the device. On the CPU they run for every call, on a GPU only with
``debug_checks=True`` or ``FLASHTILE_DEBUG=1``. Without them, kernels still access no memory outside of the
tensors.
"""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

from flashtile.problems.addresses import destinations, new_tokens, sequence_lengths
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.decode import (
    AppendOptions,
    AppendTensors,
    CacheTensors,
    CopyOptions,
    CopyTensors,
    DecodeOptions,
    capacity,
)
from flashtile.problems.masking import positions


def check_lengths(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options) -> None:
    """Raise ValueError for values of ``cu_seqlens_*`` or ``seqused_*`` that do not fit the tensors."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, *_ = extras
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is not None
        assert options.max_seqlen_q is not None
        assert options.max_seqlen_k is not None
        check_offset_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], options.max_seqlen_q)
        check_offset_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], options.max_seqlen_k)
    if extras.seqused_q is not None:
        lengths = [q.shape[1]] * q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
        check_used("seqused_q", extras.seqused_q, lengths, "queries")
    if seqused_k is not None:
        lengths = [k.shape[1]] * k.shape[0] if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
        check_used("seqused_k", seqused_k, lengths, "keys")


def check_used(name: str, used: Tensor, lengths: list[int], noun: str) -> None:
    """Raise ValueError unless each entry of ``used`` is from 0 to the length of its sequence.

    ``noun`` names the counted tokens in the message, for example "queries".
    """
    for b, (count, length) in enumerate(zip(used.tolist(), lengths, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(f"{name} must be from 0 to the {length} {noun} of sequence {b}, got {count}")


def check_offset_values(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Raise ValueError unless ``cu_seqlens`` starts with 0, never decreases and ends with at most ``total``.

    No sequence may be longer than ``max_seqlen``.
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} must start with 0, got {offsets[0]}")
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {start} then {end} at entry {i + 1}")
        if end - start > max_seqlen:
            raise ValueError(
                f"{name} has a sequence of {end - start} tokens (number {i}), but at most "
                f"{name.replace('cu_seqlens', 'max_seqlen')} = {max_seqlen} are allowed"
            )
    if offsets[-1] > total:
        raise ValueError(f"{name} must end within the tensor's {total} tokens, got {offsets[-1]}")


def check_decode_values(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> None:
    """Raise ValueError for lengths, offsets or block numbers that point outside the cache."""
    if tensors.cu_seqlens_q is not None:
        assert options.max_seqlen_q is not None
        check_offset_values("cu_seqlens_q", tensors.cu_seqlens_q, q.shape[0], options.max_seqlen_q)
        batch = tensors.cu_seqlens_q.shape[0] - 1
    else:
        batch = q.shape[0]
    most = capacity(k_cache, tensors.block_table)
    check_between("cache_seqlens", tensors.cache_seqlens, 0, most, _capacity_words(k_cache, tensors))
    check_between("cache_leftpad", tensors.cache_leftpad, 0, most, "the capacity of a sequence")
    _check_rows(k_cache, tensors.cache_batch_idx)
    lengths = sequence_lengths(batch, most, tensors, options.seqlen_new)
    if lengths is not None:
        check_between(
            "cache_seqlens with the new tokens", lengths, 0, most, _capacity_words(k_cache, tensors)
        )
    if tensors.block_table is not None:
        if lengths is None:
            lengths = torch.full((batch,), most, device=q.device)
        _check_table(k_cache, tensors.block_table, lengths)


def check_held_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> None:
    """Raise ValueError if a page is in two columns of block_table whose keys are seen.

    The kernel for ``mass`` looks for the sequences that share a page in the column where the first has it.
    """
    if tensors.block_table is None:
        return
    batch = tensors.block_table.shape[0]
    most, page_size = capacity(k_cache, tensors.block_table), k_cache.shape[1]
    lengths = sequence_lengths(batch, most, tensors, options.seqlen_new)
    keys = [most] * batch if lengths is None else lengths.tolist()
    padding = [0] * batch if tensors.cache_leftpad is None else tensors.cache_leftpad.tolist()
    rows = [q.shape[1]] * batch if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.diff().tolist()
    places: dict[int, tuple[int, int]] = {}
    for b, table in enumerate(tensors.block_table.tolist()):
        visible = range(keys[b] - padding[b])
        seen = options.masking.key_range(positions(rows[b], len(visible)), visible)
        first, stop = (padding[b] + end for end in (seen.start, seen.stop))
        for column in range(first // page_size, -(-stop // page_size)) if rows[b] and seen else ():
            other = places.setdefault(table[column], (b, column))
            if other[1] != column:
                raise ValueError(
                    "block_table must have each page in only one column in a call with mass, "
                    f"got page {table[column]} at {[*other]} and at {[b, column]}"
                )


def check_append_values(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Raise ValueError if a token would be written outside of the cache, or two tokens to one position."""
    if tensors.cu_seqlens_k_new is not None:
        longest = options.max_seqlen_k_new
        most_new = k.shape[0] if longest is None else longest
        check_offset_values("cu_seqlens_k_new", tensors.cu_seqlens_k_new, k.shape[0], most_new)
    most = capacity(k_cache, tensors.block_table)
    if tensors.slot_mapping is not None:
        slots = k_cache.shape[0] * k_cache.shape[1]
        if k.shape[0] and int(tensors.slot_mapping.max()) >= slots:
            slot = int(tensors.slot_mapping.max())
            raise ValueError(f"slot_mapping must be below {slots}, the slots of the cache, got {slot}")
    else:
        assert tensors.cache_seqlens is not None
        batch = tensors.cache_seqlens.shape[0]
        check_between("cache_seqlens", tensors.cache_seqlens, 0, most, _capacity_words(k_cache, tensors))
        _check_rows(k_cache, tensors.cache_batch_idx)
        seqlen_new = k.shape[1] if tensors.cu_seqlens_k_new is None else 0
        lengths = sequence_lengths(batch, most, tensors, seqlen_new)
        assert lengths is not None
        words = _capacity_words(k_cache, tensors)
        check_between("cache_seqlens with the tokens to append", lengths, 0, most, words)
        if tensors.block_table is not None:
            _check_table(k_cache, tensors.block_table, lengths)
        _check_angles(k, lengths, tensors, options)
    _check_writers(k_cache, k, tensors)


def check_prefix_values(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    prefix_seqlens: Tensor,
    cu_prefix_groups: Tensor | None,
    causal: bool,
) -> None:
    """Raise ValueError unless the sequences of each group share the pages of its prefix.

    Every sequence must also contain its prefix. With ``causal``, every query must see the whole prefix.
    """
    batch, page_size = q.shape[0], k_cache.shape[1]
    starts = [0, batch]
    if cu_prefix_groups is not None:
        check_offset_values("cu_prefix_groups", cu_prefix_groups, batch, batch)
        starts = cu_prefix_groups.tolist()
        if starts[-1] != batch:
            raise ValueError(f"cu_prefix_groups must end with the {batch} sequences of q, got {starts[-1]}")
    for (first, last), prefix in zip(itertools.pairwise(starts), prefix_seqlens.tolist(), strict=True):
        if first == last:
            continue
        least = prefix + max(q.shape[1] - 1, 0) if causal else prefix
        shortest = int(cache_seqlens[first:last].min())
        if prefix < 0 or shortest < least:
            raise ValueError(
                f"prefix_seqlens must be at least 0 and end before every query, got {prefix} for a "
                f"sequence of {shortest} tokens with {q.shape[1]} queries"
            )
        shared = block_table[first:last, : -(-prefix // page_size)]
        differing = (shared != shared[0]).any(1).nonzero()
        if differing.numel():
            raise ValueError(
                f"block_table must start with the same {shared.shape[1]} pages in all sequences of a group, "
                f"but rows {first} and {first + int(differing[0])} differ"
            )


def check_block_lists(kind: str, lists: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Raise ValueError for block lists that contain a block twice, or a block that does not exist.

    Args:
        kind: "kv" for lists of the key blocks of each query block, "q" for lists of the query blocks of each
            key block.
        lists: counts and indices of partial blocks, then counts and indices of full blocks.

    Returns:
        A bool tensor (2, batch or 1, heads or 1, query blocks, key blocks), with the last two dimensions
        exchanged for "q". Along the first dimension, [0] marks the partial blocks and [1] the full blocks.
    """
    found = []
    for name, num_blocks, indices in ((kind, *lists[:2]), (f"full_{kind}", *lists[2:])):
        others = indices.shape[-1]
        counts = num_blocks.flatten()
        check_between(f"block_mask.{name}_num_blocks", counts, 0, others, "the blocks of the other sequence")
        is_used = torch.arange(others, device=indices.device) < num_blocks[..., None]
        used = indices.masked_fill(~is_used, 0)
        words = "the last block of the other sequence"
        check_between(f"block_mask.{name}_indices", used.flatten(), 0, others - 1, words)
        times = torch.zeros_like(indices).scatter_add_(-1, used.long(), is_used.to(indices.dtype))
        found.append(times)
    twice = (found[0] + found[1] > 1).nonzero()
    if twice.numel():
        *place, block = twice[0].tolist()
        raise ValueError(
            f"block_mask.{kind}_indices and full_{kind}_indices must name each block once, got block {block} "
            f"twice at {place}"
        )
    return torch.stack(found) > 0


def check_copy_values(
    k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors, options: CopyOptions
) -> None:
    """Raise ValueError if a block is outside of the pool, written twice, or both read and written."""
    num_blocks = k_cache.shape[-4]
    sources, destinations = block_pairs[block_pairs[:, 0] >= 0].unbind(1)
    for name, blocks in (("sources", sources), ("destinations", destinations)):
        check_between(f"block_pairs ({name})", blocks, 0, num_blocks - 1, "the last block of the pool")
    again = _first_repeated(destinations)
    if again is not None:
        raise ValueError(f"block_pairs must write each block once, got destination {again} twice")
    both = sources[torch.isin(sources, destinations)]
    if both.numel():
        raise ValueError(f"block_pairs must not read a block that they write, got {int(both[0])} as both")


def _capacity_words(k_cache: Tensor, tensors: CacheTensors | AppendTensors) -> str:
    if tensors.block_table is None:
        return "the capacity of a row of the cache"
    return (
        f"the {tensors.block_table.shape[1]} pages of {k_cache.shape[1]} that a row of block_table can name"
    )


def check_between(name: str, values: Tensor | None, least: int, most: int, words: str) -> None:
    """Raise ValueError unless ``values`` is None or all are from ``least`` to ``most``.

    ``words`` explains ``most`` in the message.
    """
    if values is None or not values.numel() or _within(values, least, most):
        return
    wrong = ((values < least) | (values > most)).nonzero()
    i = int(wrong[0, 0])
    raise ValueError(f"{name} must be from {least} to {most} ({words}), got {int(values[i])} at entry {i}")


def _within(values: Tensor, least: int, most: int) -> bool:
    low, high = values.aminmax()
    return least <= int(low) and int(high) <= most


def _check_rows(k_cache: Tensor, cache_batch_idx: Tensor | None) -> None:
    check_between("cache_batch_idx", cache_batch_idx, 0, k_cache.shape[0] - 1, "the last row of the cache")


def _check_table(k_cache: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Check the block numbers up to each sequence's length; later entries may have any value."""
    num_blocks, page_size = k_cache.shape[:2]
    if not block_table.numel() or _within(block_table, 0, num_blocks - 1):
        return
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    used = columns[None, :] * page_size < lengths[:, None]
    wrong = (used & ((block_table < 0) | (block_table >= num_blocks))).nonzero()
    if wrong.numel():
        b, i = wrong[0].tolist()
        raise ValueError(
            f"block_table must name blocks from 0 to {num_blocks - 1} within a sequence's length, "
            f"got {int(block_table[b, i])} at [{b}, {i}] of a sequence of {int(lengths[b])} tokens"
        )


def _check_angles(k: Tensor, lengths: Tensor, tensors: AppendTensors, options: AppendOptions) -> None:
    """Check that every rotated position has a row in the rotary tables."""
    if tensors.rotary_cos is None:
        return
    assert tensors.cache_seqlens is not None
    first = (tensors.cache_seqlens if tensors.rotary_seqlens is None else tensors.rotary_seqlens).long()
    count = lengths - tensors.cache_seqlens.long()
    if tensors.q is not None:
        sequence, _ = new_tokens(tensors.q, tensors.cu_seqlens_q)
        queries = sequence.bincount(minlength=first.shape[0])
        count = torch.maximum(count, queries if options.rotate_q_by_token else queries.clamp(max=1))
    last = torch.where(count > 0, first + count - 1, first.new_zeros(()))
    name = "cache_seqlens" if tensors.rotary_seqlens is None else "rotary_seqlens"
    check_between(name, first, 0, 2**31 - 1, "positions")
    rows = tensors.rotary_cos.shape[0]
    check_between(f"{name} with the tokens to rotate", last, 0, rows - 1, "the last row of rotary_cos")


def _check_writers(k_cache: Tensor, k: Tensor, tensors: AppendTensors) -> None:
    """Raise ValueError if two new tokens would be written to one position."""
    _, rows, offsets = destinations(k_cache, k, tensors)
    again = _first_repeated(rows * k_cache.shape[1] + offsets)
    if again is None:
        return
    row, offset = divmod(again, k_cache.shape[1])
    if tensors.slot_mapping is not None:
        raise ValueError(f"slot_mapping must name each slot once, got {again} twice")
    if tensors.block_table is not None:
        raise ValueError(
            "block_table must give each token its own position, got two tokens at offset "
            f"{offset} of block {row}: a shared block must be copied before an append"
        )
    raise ValueError(f"cache_batch_idx must name each row at most once in an append, got {row} twice")


def _first_repeated(values: Tensor) -> int | None:
    """Return the smallest value that occurs more than once, or None."""
    numbers = values.tolist()
    if len(set(numbers)) == len(numbers):
        return None
    return min(number for number, count in Counter(numbers).items() if count > 1)
