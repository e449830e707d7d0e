"""Paged KV cache: a block manager together with the tensors of keys and values of all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.api.decode import append_kvcache, copy_blocks, flash_attn_with_kvcache
from flashtile.checks.arguments import as_device, check_dense, check_pair, check_tensor, is_choice, named
from flashtile.checks.attention import refuse_descales
from flashtile.kv_cache.manager import BlockManager
from flashtile.kv_cache.pool import BlockPool, Copies, as_size
from flashtile.kv_cache.table import Batch
from flashtile.problems.common import DTYPES
from flashtile.problems.decode import FP8, MAX_HEAD_DIM


class Step(NamedTuple):
    """Positions and slots of a batch's new tokens, for every layer. Its tensors are on the cache's device.

    The new tokens of all sequences are packed, total_new of them, in the order of the batch. A step is valid
    until one of its sequences is freed, swapped out, truncated, forked, cached, or gets another reservation.

    Attributes:
        block_table: (batch, max_blocks) int32.
        cache_seqlens: (batch,) int32, tokens of each sequence before this step.
        seqused_k: (batch,) int32, tokens including the new ones.
        slot_mapping: (total_new,) int64, ``block * block_size + offset`` of each new token.
        positions: (total_new,) int64, position of each new token in its sequence.
        cu_seqlens_q: (batch + 1,) int32, offset of each sequence's first new token, then total_new.
        max_seqlen_q: largest number of new tokens of a sequence.
        same_length: whether every sequence has ``max_seqlen_q`` new tokens.
        copied_blocks: number of shared blocks that were copied because the step writes to them.
        batch: the sequences.
        numbers: (batch,) int64 on the CPU, the number of this step as stored for each sequence. The step is
            valid while the stored numbers are the same.
        unwritten_layers: layers whose new keys and values are not written yet.
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
    """A block manager that holds the tensors of keys and values and copies shared blocks itself.

    A step of generation is :meth:`reserve_step`, then :meth:`attend` or :meth:`write` in each layer. All
    other methods are :class:`BlockManager`'s. A deep copy is an independent cache.

    Args:
        num_layers, num_kv_heads, head_dim: sizes of the model. ``head_dim_v`` is the head size of the values,
            if it differs.
        num_blocks: blocks of the pool; each takes :meth:`block_bytes`.
        block_size, max_sequences, max_seqlen, num_host_blocks, window_left: as for :class:`BlockManager`.
        dtype: dtype of keys and values: float16, bfloat16, float32, float64 (CPU), or float8_e4m3fn.
        device: device of the tensors. Swapped-out blocks are in host memory, pinned if there is a GPU.
        k_descale, v_descale: factors by which stored numbers are multiplied, only for float8_e4m3fn. Both or
            neither must be given: float32 on ``device``, (num_layers, num_kv_heads) or (num_layers,
            num_blocks, num_kv_heads). None: ones.

    Attributes:
        k, v: (num_layers, num_blocks, block_size, num_kv_heads, head_dim), initially zeros.
        device_block_table: ``block_table`` on ``device``, as of the last step.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is invalid or not supported.

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
        dims = _head_dims(head_dim, head_dim_v)
        self.device = device = as_device("device", device)
        _check_dtype(dtype, device)
        self.dtype = dtype
        if dtype != FP8:
            refuse_descales((None, k_descale, v_descale), "for a cache of float8_e4m3fn")
        elif k_descale is None and v_descale is None:
            k_descale, v_descale = torch.ones(2, layers, heads, dtype=torch.float32, device=device)
        else:
            check_pair("k_descale", k_descale, "v_descale", v_descale)
            here = torch.empty(0, device=device)
            shapes = (layers, heads), (layers, self.pool.num_blocks, heads)
            layout = "(num_layers, num_kv_heads) or (num_layers, num_blocks, num_kv_heads)"
            check_tensor("k_descale", k_descale, shapes, layout, here, any_strides=True)
            assert k_descale is not None
            same = (tuple(k_descale.shape),)
            check_tensor("v_descale", v_descale, same, "of k_descale", here, any_strides=True)
        self.k_descale, self.v_descale = k_descale, v_descale
        shape = (layers, self.pool.num_blocks, self.block_size, heads)
        self.k, self.v = (torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in dims)
        self._host = [
            torch.zeros(
                layers, self.host_pool.num_blocks, *tensor.shape[2:], dtype=tensor.dtype, device="cpu"
            )
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
        """Return the size of one block in bytes: keys and values of ``block_size`` tokens in all layers."""
        layers, heads = as_size("num_layers", num_layers), as_size("num_kv_heads", num_kv_heads)
        _check_dtype(dtype)
        dims = sum(_head_dims(head_dim, head_dim_v))
        return layers * as_size("block_size", block_size) * heads * dims * dtype.itemsize

    def reserve_step(self, batch: Batch, num_tokens: int | Iterable[int] | Tensor = 1) -> Step:
        """Reserve room for the next tokens of a batch, copy shared blocks, and return the tokens' slots.

        Args:
            batch: result of :meth:`batch`.
            num_tokens: number of new tokens of each sequence, (batch,), or one number for all sequences.

        Raises:
            OutOfBlocksError: there are too few blocks.
            TypeError, ValueError: as :meth:`reserve_batch`, or a sequence's previous step was not written.
        """
        copies = self.reserve_batch(batch, num_tokens)
        table, size = self.table, self.block_size
        changed, blocks = table.take_changes()
        if len(changed):
            device_table = self.device_block_table.view(-1)
            device_table.index_copy_(0, changed.to(self.device), blocks.to(self.device))
        before, after = (
            lengths.index_select(0, batch.rows) for lengths in (table.written_tensor, table.lengths_tensor)
        )
        counts, offsets = after - before, torch.zeros(len(batch) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        most, least = (int(counts.max()), int(counts.min())) if len(batch) else (0, 0)
        positions = (before - offsets[:-1]).long().repeat_interleave(counts)
        positions += torch.arange(len(positions), device="cpu")
        entries = batch.starts.repeat_interleave(counts) + positions // size
        slots = table.entries_tensor.take(entries) * size + positions % size
        rows, slots, positions = _to_device(self.device, batch.rows, slots, positions)
        before, after, offsets = _to_device(self.device, before, after, offsets)
        numbers = table.steps_tensor.index_select(0, batch.rows)
        return Step(
            block_table=self.device_block_table.index_select(0, rows),
            cache_seqlens=before,
            seqused_k=after,
            slot_mapping=slots,
            positions=positions,
            cu_seqlens_q=offsets,
            max_seqlen_q=most,
            same_length=most == least,
            copied_blocks=len(copies),
            batch=batch,
            numbers=numbers,
            unwritten_layers=set(range(len(self.k))),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, **options: Any) -> Tensor:
        """Append the step's keys and values in one layer, and attend to all keys of the sequences.

        Args:
            layer: from 0 to num_layers - 1.
            q: (total_new, heads_q, head_dim), the new tokens of all sequences one after another.
            k, v: (total_new, num_kv_heads, head_dim) and (total_new, num_kv_heads, head_dim_v).
            step: result of :meth:`reserve_step` that is still valid.
            options: options of :func:`flashtile.flash_attn_with_kvcache`: ``softmax_scale``, ``rotary_cos``,
                ``softcap``, ``sink`` and so on. ``causal`` defaults to True, or to False if ``tree_mask`` is
                given. ``window_size`` defaults to the cache's window.

        Returns:
            (total_new, heads_q, head_dim_v).

        Raises:
            TypeError, ValueError, NotImplementedError: an argument is invalid. Nothing is written then.
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
        """Write the step's keys and values in one layer, without attention.

        Args:
            layer: from 0 to num_layers - 1.
            k, v: (total_new, num_kv_heads, head_dim) and (total_new, num_kv_heads, head_dim_v).
            step: result of :meth:`reserve_step` that is still valid.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument is invalid. Nothing is written then.
        """
        layer = self._check(layer, step, k=k, v=v)
        descales = self._descales(layer)
        append_kvcache(self.k[layer], self.v[layer], k, v, slot_mapping=step.slot_mapping, **descales)
        self._mark_layer(layer, step)

    def _check(self, layer: int, step: Step, **tensors: Tensor) -> int:
        """Validate the arguments of :meth:`attend` and :meth:`write`, and return ``layer`` as an int."""
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
                f"step is no longer valid: sequence {sequence} has been "
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
            copy_blocks(block_pairs=torch.tensor(copies, device="cpu").to(self.device), **self._tensors())
        elif copies:
            own = list(self._tensors().values())
            pair = (own, self._host) if source is self.pool else (self._host, own)
            origins, destinations = torch.tensor(copies, device="cpu").unbind(1)
            for old, new in zip(*pair, strict=True):
                move_blocks(old, new, origins.to(old.device), destinations.to(new.device))

    def _tensors(self) -> dict[str, Any]:
        """Return the tensors (num_layers, num_blocks, ...) that ``copy_blocks`` takes, by argument name."""
        descales = {"k_descale": self.k_descale, "v_descale": self.v_descale}
        of_blocks = {name: d for name, d in descales.items() if d is not None and d.dim() == 3}
        return {"k_cache": self.k, "v_cache": self.v, **of_blocks}

    def _descales(self, layer: int) -> dict[str, Any]:
        if self.k_descale is None or self.v_descale is None:
            return {}
        return {"k_descale": self.k_descale[layer], "v_descale": self.v_descale[layer]}


def _to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy CPU tensors of one dtype to the device in one transfer."""
    if device.type == "cpu":
        return tensors
    return torch.cat(tensors).to(device).split([len(tensor) for tensor in tensors])


def move_blocks(old: Tensor, new: Tensor, origins: Tensor, destinations: Tensor) -> None:
    """Copy blocks ``origins`` of ``old`` to blocks ``destinations`` of ``new``, possibly between devices.

    Both tensors are (num_layers, num_blocks, ...). Layers are copied one at a time, so the temporary memory
    is only that of one layer.
    """
    for source, target in zip(_bytes(old), _bytes(new), strict=True):
        target.index_copy_(0, destinations, source.index_select(0, origins).to(target.device))


def _bytes(memory: Tensor) -> Tensor:
    """View a tensor of one-byte elements as uint8, because not every device can index FP8 tensors."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory


def _head_dims(head_dim: Any, head_dim_v: Any) -> tuple[int, int]:
    """Validate both head sizes and return (head_dim of keys, head_dim of values)."""
    of_keys = as_size("head_dim", head_dim, 1, MAX_HEAD_DIM)
    return of_keys, of_keys if head_dim_v is None else as_size("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM)


def _check_dtype(dtype: Any, device: torch.device | None = None) -> None:
    on_gpu = device is not None and device.type != "cpu"
    if not is_choice(dtype, (*DTYPES, FP8)) or (dtype == torch.float64 and on_gpu):
        allowed = "float16, bfloat16, float32, float8_e4m3fn or, on the CPU, float64"
        where = "" if device is None else f" for {device}"
        raise TypeError(f"dtype must be {allowed}, got {named(dtype)}{where}")
