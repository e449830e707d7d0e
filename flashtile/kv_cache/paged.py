"""Keys and values of all layers in blocks, beside the manager that says which block is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.decode.functional import append_kvcache, copy_blocks, flash_attn_with_kvcache
from flashtile.kv_cache.manager import BlockManager, Copies, check_size
from flashtile.kv_cache.table import Batch


class Step(NamedTuple):
    """Where the new tokens of a batch go, for every layer. All tensors are on the device of the cache.

    The new tokens of all sequences lie behind one another, total_new of them, in the order of the batch.

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


class PagedKVCache:
    """A block manager with its tensors.

    Sequences are created, forked, remembered and freed by ``manager``. What moves bytes is done here: growing
    (:meth:`append`, then :meth:`attend` or :meth:`store` in each layer) and swapping.

    Args:
        num_layers, num_kv_heads, head_dim: of the model. ``head_dim_v`` is that of the values, if it differs.
        num_blocks: blocks of the pool; each costs :meth:`block_bytes`.
        block_size, max_sequences, max_seqlen, num_host_blocks, window_left: as for :class:`BlockManager`.
        dtype: of keys and values: float16, bfloat16, float32, or float8_e4m3fn.
        device: of the tensors; swapped-out blocks lie in host memory (pinned beside a GPU).
        k_descale, v_descale: float32 on ``device``, for float8_e4m3fn only: what a stored number is
            multiplied by, (num_layers, num_kv_heads) or (num_layers, num_blocks, num_kv_heads), both or
            neither. None: ones.

    Attributes:
        k, v: (num_layers, num_blocks, block_size, num_kv_heads, head_dim), zeros at first.
        block_table: (max_sequences, max_blocks) int32 on ``device``, the manager's as of the last step.
        manager: the :class:`BlockManager`.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.
    """

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
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, size in (
            ("num_layers", num_layers),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
            ("head_dim_v", head_dim_v),
        ):
            check_size(name, size)
        self.manager = BlockManager(
            num_blocks,
            block_size,
            max_sequences=max_sequences,
            max_seqlen=max_seqlen,
            num_host_blocks=num_host_blocks,
            window_left=window_left,
        )
        self.device, self.dtype = torch.device(device), dtype
        if dtype == torch.float8_e4m3fn and k_descale is None and v_descale is None:
            k_descale, v_descale = torch.ones(2, num_layers, num_kv_heads, device=device)
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
            _check_descale(name, descale, dtype, num_layers, num_blocks, num_kv_heads)
        if k_descale is not None and v_descale is not None and k_descale.shape != v_descale.shape:
            raise ValueError(
                f"v_descale must have the shape of k_descale, {tuple(k_descale.shape)}, "
                f"got {tuple(v_descale.shape)}"
            )
        self.k_descale, self.v_descale = k_descale, v_descale
        block = (block_size, num_kv_heads)
        self.k = torch.zeros(num_layers, num_blocks, *block, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(num_layers, num_blocks, *block, head_dim_v, dtype=dtype, device=device)
        pinned = self.device.type == "cuda" and num_host_blocks > 0
        self._host = [
            torch.zeros(num_layers, num_host_blocks, *memory.shape[2:], dtype=memory.dtype, pin_memory=pinned)
            for memory in self._memories()
        ]
        self.block_table = torch.zeros_like(self.manager.block_table, device=device)

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

    def append(self, batch: Batch, num_tokens: int | Sequence[int] | Tensor = 1) -> Step:
        """Room for the next tokens of a batch, shared blocks copied first, and where the tokens go.

        Args:
            batch: from ``manager.batch(sequences)``.
            num_tokens: new tokens of each sequence, (batch,), or one number for all.

        Raises:
            OutOfBlocksError: nothing has changed.
            ValueError: a sequence does not exist, is swapped out or would be longer than ``max_seqlen``.
        """
        copies = self.manager.append_each(batch, num_tokens)
        self._copy(copies)
        self._update_table()
        counts = torch.as_tensor(num_tokens, dtype=torch.int32, device="cpu").expand(len(batch))
        return self._describe(batch, counts, len(copies))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, **options: Any) -> Tensor:
        """Write the step's keys and values and attend to all of the sequences', in one layer.

        Args:
            q: (total_new, heads_q, head_dim).
            k, v: (total_new, num_kv_heads, head_dim) and (..., head_dim_v).
            options: of :func:`flashtile.flash_attn_with_kvcache`: ``softmax_scale``, ``rotary_cos``,
                ``softcap``, ``sink`` and so on. ``causal`` is True unless there is a ``tree_mask``, and
                ``window_size`` that of the cache.

        Returns:
            (total_new, heads_q, head_dim_v).
        """
        options.setdefault("causal", "tree_mask" not in options)
        if self.manager.window_left >= 0:
            options.setdefault("window_size", (self.manager.window_left, -1))
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
        return out.flatten(0, 1) if step.same_length else out

    def store(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Write the step's keys (total_new, num_kv_heads, head_dim) and values in one layer, nothing else."""
        append_kvcache(
            self.k[layer], self.v[layer], k, v, slot_mapping=step.slot_mapping, **self._descales(layer)
        )

    def swap_out(self, sequences: Sequence[int]) -> None:
        """Move sequences to host memory; see :meth:`BlockManager.swap_out`."""
        self._move(self.manager.swap_out(sequences), self._memories(), self._host)

    def swap_in(self, sequences: Sequence[int]) -> None:
        """Bring sequences back; see :meth:`BlockManager.swap_in`."""
        self._move(self.manager.swap_in(sequences), self._host, self._memories())

    def _memories(self) -> list[Tensor]:
        """All that belongs to a block, each (num_layers, num_blocks, ...)."""
        descales = [d for d in (self.k_descale, self.v_descale) if d is not None and d.dim() == 3]
        return [self.k, self.v, *descales]

    def _move(self, copies: Copies, sources: list[Tensor], targets: list[Tensor]) -> None:
        if not copies:
            return
        origins, destinations = torch.tensor(copies).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            here, there = origins.to(source.device), destinations.to(target.device)
            for layer in range(len(source)):  # one at a time: what lies between takes a layer's memory only
                moved = _bytes(source[layer]).index_select(0, here).to(target.device)
                _bytes(target[layer]).index_copy_(0, there, moved)

    def _describe(self, batch: Batch, counts: Tensor, copied_blocks: int) -> Step:
        manager, size = self.manager, self.manager.block_size
        after = manager.lengths.index_select(0, batch.rows)
        before = after - counts
        offsets = torch.zeros(len(batch) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        most, least = (int(counts.max()), int(counts.min())) if len(batch) else (0, 0)
        positions = (before - offsets[:-1]).long().repeat_interleave(counts)
        positions += torch.arange(len(positions))
        entries = batch.starts.repeat_interleave(counts) + positions // size
        slots = manager.block_table.take(entries) * size + positions % size
        rows, slots, positions = _to_device(self.device, batch.rows, slots, positions)
        before, after, offsets = _to_device(self.device, before, after, offsets)
        table = self.block_table.index_select(0, rows)
        return Step(table, before, after, slots, positions, offsets, most, most == least, copied_blocks)

    def _copy(self, copies: Copies) -> None:
        if copies:
            per_block = self.k_descale is not None and self.k_descale.dim() == 3
            copy_blocks(
                self.k,
                self.v,
                torch.tensor(copies).to(self.device),
                k_descale=self.k_descale if per_block else None,
                v_descale=self.v_descale if per_block else None,
            )

    def _update_table(self) -> None:
        positions, entries = self.manager.table.take_changes()
        if len(positions):
            table = self.block_table.view(-1)
            table.index_copy_(0, positions.to(self.device), entries.to(self.device))

    def _descales(self, layer: int) -> dict[str, Any]:
        if self.k_descale is None or self.v_descale is None:
            return {}
        return {"k_descale": self.k_descale[layer], "v_descale": self.v_descale[layer]}


def _to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one dtype on the CPU, to the device in one transfer."""
    if device.type == "cpu":
        return tensors
    return torch.cat(tensors).to(device).split([len(tensor) for tensor in tensors])


def _bytes(memory: Tensor) -> Tensor:
    """The same memory as numbers that can be indexed on every device: FP8 has few operations."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory


def _check_descale(
    name: str, descale: Tensor | None, dtype: torch.dtype, num_layers: int, num_blocks: int, num_kv_heads: int
) -> None:
    if dtype != torch.float8_e4m3fn:
        if descale is not None:
            raise ValueError(f"{name} must be None for a cache of {dtype}: it belongs to float8_e4m3fn")
        return
    if not isinstance(descale, Tensor) or descale.dtype != torch.float32:
        got = getattr(descale, "dtype", type(descale).__name__)
        raise TypeError(f"{name} must be a float32 torch.Tensor, got {got}")
    allowed = (num_layers, num_kv_heads), (num_layers, num_blocks, num_kv_heads)
    if tuple(descale.shape) not in allowed:
        raise ValueError(f"{name} must have shape {allowed[0]} or {allowed[1]}, got {tuple(descale.shape)}")
