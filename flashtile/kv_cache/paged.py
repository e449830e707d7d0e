"""A block manager with the keys and values of all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.api.decode import append_kvcache, copy_blocks, flash_attn_with_kvcache
from flashtile.checks.arguments import check_dense, check_floats, check_pair
from flashtile.checks.conversions import refuse_descales
from flashtile.kv_cache.arguments import as_size
from flashtile.kv_cache.manager import BlockManager
from flashtile.kv_cache.pool import BlockPool, Copies
from flashtile.kv_cache.table import Batch
from flashtile.problems.common import DTYPES
from flashtile.problems.decode import FP8, MAX_HEAD_DIM


class Step(NamedTuple):
    """Where the new tokens of a batch go, for every layer. Its tensors are on the device of the cache.

    The new tokens of all sequences are packed, total_new of them, in the order of the batch. A step is true
    until one of its sequences is freed, swapped out, truncated, forked, cached or reserved for again.

    Attributes:
        block_table: (batch, max_blocks) int32.
        cache_seqlens: (batch,) int32, tokens of each sequence before this step.
        seqused_k: (batch,) int32, tokens with the new ones.
        slot_mapping: (total_new,) int64, ``block * block_size + offset`` of each new token.
        positions: (total_new,) int64, of each new token in its sequence.
        cu_seqlens_q: (batch + 1,) int32, where each sequence's new tokens start, and the end.
        max_seqlen_q: the most new tokens of a sequence.
        same_length: every sequence has ``max_seqlen_q`` new tokens.
        copied_blocks: shared blocks that were copied because they are written to.
        batch: the sequences.
        numbers: (batch,) int64 on the CPU, of this step: the cache knows by it whether the step is true.
        unwritten_layers: layers that still miss the new keys and values.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    seqused_k: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    same_length: bool
    copied_blocks: int
    batch: Batch
    numbers: Tensor
    unwritten_layers: set[int]


class PagedKVCache(BlockManager):
    """A block manager with its tensors, which copies what must be copied.

    A step of generation is :meth:`reserve_step`, then :meth:`attend` or :meth:`write` in each layer. All else
    is :class:`BlockManager`'s. A deep copy is a cache of its own.

    Args:
        num_layers, num_kv_heads, head_dim: of the model. ``head_dim_v`` is that of the values, if it differs.
        num_blocks: blocks of the pool; each costs :meth:`block_bytes`.
        block_size, max_sequences, max_seqlen, num_host_blocks, window_left: as for :class:`BlockManager`.
        dtype: of keys and values: float16, bfloat16, float32, float64 (CPU), or float8_e4m3fn.
        device: of the tensors; swapped-out blocks lie in host memory (pinned beside a GPU).
        k_descale, v_descale: float32 on ``device``, for float8_e4m3fn only: what a stored number is
            multiplied by, (num_layers, num_kv_heads) or (num_layers, num_blocks, num_kv_heads), both or
            neither. None: ones.

    Attributes:
        k, v: (num_layers, num_blocks, block_size, num_kv_heads, head_dim), zeros at first.
        device_block_table: ``block_table`` on ``device``, as of the last step.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> from flashtile.kv_cache import PagedKVCache
        >>> cache = PagedKVCache(
        ...     num_layers=1, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, max_sequences=2,
        ...     max_seqlen=64, dtype=torch.float32,
        ... )
        >>> batch = cache.batch([cache.create()])
        >>> step = cache.reserve_step(batch, 20)  # a prompt of 20 tokens
        >>> q, (k, v) = torch.randn(20, 8, 64), torch.randn(2, 20, 2, 64).unbind()
        >>> cache.attend(0, q, k, v, step).shape
        torch.Size([20, 8, 64])
    """

    has_tensors = True

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_sequences: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        window_left: int = -1,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ):
        super().__init__(
            num_blocks,
            block_size,
            max_sequences=max_sequences,
            max_seqlen=max_seqlen,
            num_host_blocks=num_host_blocks,
            window_left=window_left,
        )
        layers, heads = as_size("num_layers", num_layers), as_size("num_kv_heads", num_kv_heads)
        dims = [as_size("head_dim", head_dim, 1, MAX_HEAD_DIM)]
        dims += [dims[0] if head_dim_v is None else as_size("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)]
        self.device, self.dtype = torch.device(device), dtype
        if dtype not in (*DTYPES, FP8) or (dtype == torch.float64 and self.device.type != "cpu"):
            allowed = "float16, bfloat16, float32, float8_e4m3fn or, on the CPU, float64"
            raise TypeError(f"dtype must be {allowed}, got {dtype} for {self.device}")
        if dtype != FP8:
            refuse_descales(None, k_descale, v_descale, "for a cache of float8_e4m3fn")
        elif k_descale is None and v_descale is None:
            k_descale, v_descale = torch.ones(2, layers, heads, device=device)
        else:
            check_pair("k_descale", k_descale, "v_descale", v_descale)
            here = torch.empty(0, device=device)
            shapes = (layers, heads), (layers, self.pool.num_blocks, heads)
            layout = "(num_layers, num_kv_heads) or (num_layers, num_blocks, num_kv_heads)"
            check_floats("k_descale", k_descale, shapes, layout, here, any_strides=True)
            assert k_descale is not None
            same = (tuple(k_descale.shape),)
            check_floats("v_descale", v_descale, same, "of k_descale", here, any_strides=True)
        self.k_descale, self.v_descale = k_descale, v_descale
        shape = (layers, self.pool.num_blocks, self.block_size, heads)
        self.k, self.v = (torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in dims)
        self._host = [
            torch.zeros(layers, self.host_pool.num_blocks, *tensor.shape[2:], dtype=tensor.dtype)
            for tensor in self._tensors().values()
        ]
        self._pin_host()
        self.device_block_table = torch.zeros_like(self.block_table, device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pin_host()  # a copy of pinned memory is not pinned

    def _pin_host(self) -> None:
        if self.device.type == "cuda" and self.host_pool.num_blocks:
            self._host = [tensor.pin_memory() for tensor in self._host]

    @staticmethod
    def block_bytes(
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> int:
        """Bytes of one block in all layers, keys and values: memory divided by this is ``num_blocks``."""
        both = head_dim + (head_dim if head_dim_v is None else head_dim_v)
        return num_layers * block_size * num_kv_heads * both * dtype.itemsize

    def reserve_step(self, batch: Batch, num_tokens: int | Iterable[int] | Tensor = 1) -> Step:
        """Room for the next tokens of a batch, shared blocks copied first, and where the tokens go.

        Args:
            batch: from :meth:`batch`.
            num_tokens: new tokens of each sequence, (batch,), or one number for all.

        Raises:
            OutOfBlocksError: there are too few blocks.
            TypeError, ValueError: as :meth:`reserve_batch`, or the last step of a sequence is not written.
        """
        copies = self.reserve_batch(batch, num_tokens)
        positions, entries = self.table.take_changes()
        if len(positions):
            table = self.device_block_table.view(-1)
            table.index_copy_(0, positions.to(self.device), entries.to(self.device))
        return self._describe(batch, len(copies))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, **options: Any) -> Tensor:
        """Write the step's keys and values and attend to all of the sequences', in one layer.

        Args:
            layer: from 0 to num_layers - 1.
            q: (total_new, heads_q, head_dim).
            k, v: (total_new, num_kv_heads, head_dim) and (..., head_dim_v).
            step: from :meth:`reserve_step`, still true.
            options: of :func:`flashtile.flash_attn_with_kvcache`: ``softmax_scale``, ``rotary_cos``,
                ``softcap``, ``sink`` and so on. ``causal`` is True unless there is a ``tree_mask``, and
                ``window_size`` that of the cache.

        Returns:
            (total_new, heads_q, head_dim_v).

        Raises:
            TypeError, ValueError, NotImplementedError: naming the argument, before anything is written.
        """
        layer = self._check(layer, step, q=q, k=k, v=v)
        options.setdefault("causal", "tree_mask" not in options)
        if self.window_left >= 0:
            options.setdefault("window_size", (self.window_left, -1))
        if step.same_length:
            shape = (len(step.cache_seqlens), step.max_seqlen_q)
            q, k, v = (tensor.unflatten(0, shape) for tensor in (q, k, v))
        else:
            options.update(
                cu_seqlens_q=step.cu_seqlens_q,
                max_seqlen_q=step.max_seqlen_q,
                cu_seqlens_k_new=step.cu_seqlens_q,
                max_seqlen_k_new=step.max_seqlen_q,
            )
        out = flash_attn_with_kvcache(
            q,
            self.k[layer],
            self.v[layer],
            k,
            v,
            cache_seqlens=step.cache_seqlens,
            block_table=step.block_table,
            **self._descales(layer),
            **options,
        )
        self._mark_layer(layer, step)
        return out.flatten(0, 1) if step.same_length else out

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Write the step's keys (total_new, num_kv_heads, head_dim) and values in one layer, nothing else."""
        layer = self._check(layer, step, k=k, v=v)
        descales = self._descales(layer)
        append_kvcache(self.k[layer], self.v[layer], k, v, slot_mapping=step.slot_mapping, **descales)
        self._mark_layer(layer, step)

    def _check(self, layer: int, step: Step, **tensors: Tensor) -> int:
        """``layer`` as an int, or an error that names the argument that does not fit the others."""
        layer = as_size("layer", layer, 0, len(self.k) - 1)
        if not isinstance(step, Step):
            raise TypeError(f"step must come from PagedKVCache.reserve_step, got {type(step).__name__}")
        table, batch = self.table, step.batch
        if batch.owner is not table.owner:
            raise ValueError("step must come from this cache's reserve_step, got another cache's")
        numbers = table.steps_tensor.index_select(0, batch.rows)
        if not torch.equal(numbers, step.numbers):
            sequence = batch.sequences[int((numbers != step.numbers).nonzero()[0])]
            what = "swapped out, truncated, forked, cached or reserved for again"
            raise ValueError(
                f"step is no longer true: sequence {sequence} has been "
                f"{what if sequence in table.rows else 'freed'} since"
            )
        total_new = len(step.positions)
        for name, tensor in tensors.items():
            check_dense(name, tensor)
            if tensor.dim() != 3 or len(tensor) != total_new:
                shape = f"(total_new, heads, head_dim) with the step's total_new = {total_new}"
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        return layer

    def _mark_layer(self, layer: int, step: Step) -> None:
        if step.unwritten_layers:
            step.unwritten_layers.discard(layer)
            if not step.unwritten_layers:
                self.mark_written(step.batch)

    def move(self, copies: Copies, source: BlockPool, target: BlockPool) -> None:
        if copies and source is target:
            copy_blocks(block_pairs=torch.tensor(copies).to(self.device), **self._tensors())
        elif copies:
            own = list(self._tensors().values())
            pair = (own, self._host) if source is self.pool else (self._host, own)
            origins, destinations = torch.tensor(copies).unbind(1)
            for old, new in zip(*pair, strict=True):
                here, there = origins.to(old.device), destinations.to(new.device)
                for layer in range(len(old)):  # one at a time: what lies between takes a layer's memory only
                    moved = _bytes(old[layer]).index_select(0, here).to(new.device)
                    _bytes(new[layer]).index_copy_(0, there, moved)

    def _tensors(self) -> dict[str, Any]:
        """All that belongs to a block, each (num_layers, num_blocks, ...), as ``copy_blocks`` names it."""
        descales = {"k_descale": self.k_descale, "v_descale": self.v_descale}
        of_blocks = {name: d for name, d in descales.items() if d is not None and d.dim() == 3}
        return {"k_cache": self.k, "v_cache": self.v, **of_blocks}

    def _descales(self, layer: int) -> dict[str, Any]:
        if self.k_descale is None or self.v_descale is None:
            return {}
        return {"k_descale": self.k_descale[layer], "v_descale": self.v_descale[layer]}

    def _describe(self, batch: Batch, copied_blocks: int) -> Step:
        table, size = self.table, self.block_size
        before, after = (
            lengths.index_select(0, batch.rows) for lengths in (table.written_tensor, table.lengths_tensor)
        )
        counts, offsets = after - before, torch.zeros(len(batch) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        most, least = (int(counts.max()), int(counts.min())) if len(batch) else (0, 0)
        positions = (before - offsets[:-1]).long().repeat_interleave(counts)
        positions += torch.arange(len(positions))
        entries = batch.starts.repeat_interleave(counts) + positions // size
        slots = table.entries_tensor.take(entries) * size + positions % size
        rows, slots, positions = _to_device(self.device, batch.rows, slots, positions)
        before, after, offsets = _to_device(self.device, before, after, offsets)
        numbers = table.steps_tensor.index_select(0, batch.rows)
        return Step(
            self.device_block_table.index_select(0, rows), before, after, slots, positions, offsets,
            most, most == least, copied_blocks, batch, numbers, set(range(len(self.k))),
        )  # fmt: skip


def _to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one dtype on the CPU, to the device in one transfer."""
    if device.type == "cpu":
        return tensors
    return torch.cat(tensors).to(device).split([len(tensor) for tensor in tensors])


def _bytes(memory: Tensor) -> Tensor:
    """The same memory as numbers that can be indexed on every device: FP8 has few operations."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
