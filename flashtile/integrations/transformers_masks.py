"""Reads Transformers' padding masks and position ids, once per forward pass for all layers of a model."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary


class Runs(NamedTuple):
    """A padded batch as packed sequences: each run of tokens and each run of padding counts as a sequence."""

    cu_seqlens: Tensor  # (runs + 1,) int32
    seqused_k: Tensor  # (runs,) int32, 0 for padding


class Padding:
    """Summary of a padding mask (batch, seqlen) that is True for keys that are not padding.

    The constructor waits for the device; the methods do not. The mask itself is not stored, because it is the
    weak key of this object in a dictionary, and a reference to the mask would keep the entry alive.

    Attributes:
        whole: whether there is no padding.
        solid: whether the keys of each sequence are contiguous, with padding only before and after them.
        on_left, on_right: whether all padding is before the keys, or after them.
    """

    def __init__(self, mask: Tensor) -> None:
        self._device, self._shape = mask.device, mask.shape
        keys = mask.bool().cpu()
        self.whole = bool(keys.all())
        # Number of keys of each sequence, and where they begin if they are contiguous.
        self._lengths, self._starts = keys.sum(1), keys.int().argmax(1)
        self.solid = self.on_left = self.on_right = self.whole
        if self.whole:
            return
        ends = self._starts + self._lengths
        self.on_left = bool((ends == keys.shape[1]).all())  # implies that the keys are contiguous
        if self.on_left:
            self.solid = True
        else:
            places = torch.arange(keys.shape[1], device="cpu")
            side_by_side = (places >= self._starts[:, None]) & (places < ends[:, None])
            self.solid = torch.equal(side_by_side, keys)
        self.on_right = self.solid and not bool(self._starts.any())

    @functools.cached_property
    def starts(self) -> Tensor:
        """Position of the first key of each sequence, (batch,) int32 on the mask's device."""
        return self._on_device(self._starts)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Number of keys of each sequence, (batch,) int32 on the mask's device."""
        return self._on_device(self._lengths)

    @functools.cached_property
    def runs(self) -> Runs:
        """Three runs per sequence: the padding before its tokens, the tokens, and the padding after them.

        Queries in the padding attend to no key. So their results and gradients are 0, and they cost hardly
        any work. The batch is used as it is: no token needs to be moved.
        """
        batch, seqlen = self._shape
        begin = torch.arange(batch, device="cpu") * seqlen
        first = begin + self._starts
        bounds = torch.stack((begin, first, first + self._lengths), 1).flatten()
        used = F.pad(self._lengths[:, None], (1, 1)).flatten()
        return Runs(self._on_device(F.pad(bounds, (0, 1), value=batch * seqlen)), self._on_device(used))

    def _on_device(self, numbers: Tensor) -> Tensor:
        return numbers.int().to(self._device, non_blocking=True)


class _Known:
    """The result of reading a tensor. It is valid for one forward pass: each layer uses the result once.

    A tensor's version does not count every write (numpy, ``.data``, kernels, graph replays), and comparing
    elements would make every layer wait for the device. However, nothing writes to the tensor between the
    layers of a forward pass. So the tensor is read again if its version has changed, if a layer or another
    model uses it again, or if a new pass has begun. Models create masks when a pass begins.

    Args:
        found: the result.
        in_pass: number of the forward pass (``_passes.count``) for which the result is valid; None: for any
            pass.
    """

    def __init__(self, tensor: Tensor, found: Any, in_pass: int | None) -> None:
        self.found, self._in_pass, self._version = found, in_pass, _version(tensor)
        self._config: Any = None
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()

    def holds(self, tensor: Tensor, module: Any) -> bool:
        """Whether ``self.found`` is still valid for ``tensor`` and the attention module ``module``.

        If so, the use is recorded, because each module may use the result only once.
        """
        config = getattr(module, "config", None)
        current = self._in_pass is None or self._in_pass == _passes.count
        if not current or module in self._asked or self._version != _version(tensor):
            return False
        if self._asked and self._config is not config:
            return False
        self._config = config
        self._asked.add(module)
        return True


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Passes(threading.local):
    count = 0
    """Number of masks created in this thread. Models create them at the start of a forward pass."""


_passes = _Passes()

_read: Any = WeakTensorKeyDictionary()
"""Maps a tensor, held weakly, to the :class:`_Known` that was read from it."""


def padding_of(mask: Tensor, module: Any) -> Padding:
    """Return the summary of a padding mask (batch, seqlen), which is read once per forward pass.

    Args:
        mask: the padding mask, which must be the same tensor object in all layers.
        module: the layer's attention module.
    """
    padding: Padding = _once(mask, module, Padding)
    return padding


class Packing(NamedTuple):
    """Sequences that are packed one after another in a batch of one."""

    cu_seqlens: Tensor  # (sequences + 1,) int32
    max_seqlen: int


def packing_of(positions: Tensor, module: Any) -> Packing | None:
    """Return the packing that ``positions`` (1, tokens) describe, or None if there is only one sequence.

    The positions are read once per forward pass, like the mask in :func:`padding_of`.
    """
    packing: Packing | None = _once(positions, module, _read_positions)
    return packing


def _read_positions(positions: Tensor) -> Packing | None:
    from transformers import modeling_flash_attention_utils as flash

    if not flash._is_packed_sequence(positions, 1):
        return None
    (cu_seqlens, _), (longest, _) = flash.prepare_fa_kwargs_from_position_ids(positions)
    return Packing(cu_seqlens.int(), int(longest))


def _once(tensor: Tensor, module: Any, read: Callable[[Tensor], Any]) -> Any:
    """Return ``read(tensor)``, or its earlier result if that is still valid for ``module``."""
    known = _read.get(tensor)
    if known is None or not known.holds(tensor, module):
        known = _read[tensor] = _Known(tensor, read(tensor), _passes.count)
        known.holds(tensor, module)
    return known.found


def mask_of_keys(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap Transformers' function that makes the mask of a forward pass, so that each mask is read once.

    Without padding, the wrapped function returns None. With padding, it returns a padding mask (batch, keys).
    For a static cache, the mask covers only the keys that have been written. If a model hides scores by other
    rules than causality and windows, the result is a mask with one element per score, (batch, 1, queries,
    keys). For example, Gemma 3's image tokens all see each other.
    """

    @functools.wraps(original)
    def mask(*, kv_length: int, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
        if not torch.compiler.is_compiling():
            _passes.count += 1
        if _says_more(**named):
            from transformers.masking_utils import sdpa_mask

            always = {"kv_length": kv_length, "attention_mask": attention_mask, "allow_is_causal_skip": False}
            return sdpa_mask(**named | always)
        if attention_mask is None and "allow_is_bidirectional_skip" not in named:
            written = int(named["q_offset"]) + named["q_length"] - named["kv_offset"]
            if written < kv_length:
                device = named.get("device")
                attention_mask = torch.ones(named["batch_size"], written, dtype=torch.bool, device=device)
        if attention_mask is None or torch.compiler.is_compiling() or attention_mask.dim() != 2:
            return original(kv_length=kv_length, attention_mask=attention_mask, **named)
        # A sliding-window cache holds only the last keys. The caller may write to its mask later, so copy it.
        keys = attention_mask[:, -kv_length:].clone()
        padding = Padding(keys)
        if padding.whole and keys.shape[1] == kv_length:
            return None
        _read[keys] = _Known(keys, padding, None)
        return keys

    return mask


def _says_more(
    mask_function: Callable[..., Any] | None = None, use_vmap: bool = False, config: Any = None, **others: Any
) -> bool:
    """Whether a mask needs more than the options for causality, windows and packed sequences.

    A model adds other rules with its own mask function (``use_vmap`` is then set), or with blocks of tokens
    that see each other (``or_masks``).

    In models whose config has ``use_bidirectional_attention``, attention modules are not causal. If such a
    model passes its own mask function, the mask function only removes causality, and the result is False. If
    it passes none, the mask is causal although the module is not, and the result is True.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    if use_vmap or both_ways:
        return use_vmap != both_ways
    return getattr(mask_function, "__qualname__", "").startswith("or_masks.")
