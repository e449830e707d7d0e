"""Contents of Transformers' masks of keys and of its positions, read once for all layers of a model."""

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
    """A padded batch described as packed sequences: runs of tokens, and runs of padding without keys."""

    cu_seqlens: Tensor  # (runs + 1,) int32
    seqused_k: Tensor  # (runs,) int32, 0 for padding


class Padding:
    """Contents of a mask of keys, (batch, seqlen) and True for keys that exist.

    Making one waits for the device; nothing after that does. The mask itself is not kept, because it holds
    this object alive in turn.
    """

    def __init__(self, mask: Tensor) -> None:
        self._device, self._shape = mask.device, mask.shape
        keys = mask.bool().cpu()
        self.whole = bool(keys.all())
        """Whether there is no padding."""
        self._lengths, self._starts = keys.sum(1), keys.int().argmax(1)
        """Number of keys of each sequence, and where they begin if they are contiguous."""
        self.solid = self.on_left = self.on_right = self.whole
        if self.whole:
            return
        ends = self._starts + self._lengths
        self.on_left = bool((ends == keys.shape[1]).all())  # then there is no padding in between
        if self.on_left:
            self.solid = True
            """Whether the keys of each sequence are contiguous, with padding only before and after them."""
        else:
            places = torch.arange(keys.shape[1])
            side_by_side = (places >= self._starts[:, None]) & (places < ends[:, None])
            self.solid = torch.equal(side_by_side, keys)
        self.on_right = self.solid and not bool(self._starts.any())

    @functools.cached_property
    def starts(self) -> Tensor:
        """(batch,) int32, where the keys of each sequence begin."""
        return self._on_device(self._starts)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """(batch,) int32, how many keys each sequence has."""
        return self._on_device(self._lengths)

    @functools.cached_property
    def runs(self) -> Runs:
        """Three runs per sequence: the padding before its tokens, the tokens, and the padding after them.

        Queries of padding see no key: their results and gradients are 0 and cost hardly any work. So no
        tokens have to be packed and unpacked.
        """
        batch, seqlen = self._shape
        begin = torch.arange(batch) * seqlen
        first = begin + self._starts
        bounds = torch.stack((begin, first, first + self._lengths), 1).flatten()
        used = F.pad(self._lengths[:, None], (1, 1)).flatten()
        return Runs(self._on_device(F.pad(bounds, (0, 1), value=batch * seqlen)), self._on_device(used))

    def _on_device(self, numbers: Tensor) -> Tensor:
        return numbers.int().to(self._device, non_blocking=True)


class _Known:
    """The contents of a tensor, valid for one forward pass of one model, in which each layer reads them once.

    A version does not count every write (numpy, ``.data``, kernels, graph replays), and comparing the
    elements would make every layer wait for the device. But nothing writes to the tensor between the layers
    of a forward pass. So it is read again when a layer comes a second time, for another model, and in a new
    pass, which begins with the creation of masks.
    """

    def __init__(self, tensor: Tensor, found: Any, in_pass: int | None) -> None:
        self.found, self._in_pass, self._version = found, in_pass, _version(tensor)
        self._config: Any = None
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()

    def holds(self, tensor: Tensor, module: Any) -> bool:
        """Whether ``module``, a layer's attention, may use the contents. Records that it has used them."""
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
    """Masks made in this thread, which models do at the start of a forward pass."""


_passes = _Passes()

_read: Any = WeakTensorKeyDictionary()
"""Results by tensor, kept as long as the tensor lives."""


def padding_of(mask: Tensor, module: Any) -> Padding:
    """Return the contents of a mask of keys, read once per forward pass: all layers get the same tensor.

    Args:
        module: the layer's attention.
    """
    padding: Padding = _once(mask, module, Padding)
    return padding


class Packing(NamedTuple):
    """Sequences that lie one after the other in a batch of one."""

    cu_seqlens: Tensor
    max_seqlen: int


def packing_of(positions: Tensor, module: Any) -> Packing | None:
    """Return the packing that restarting positions of a batch of one describe, or None. See
    :func:`padding_of`."""
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
    """Wrap Transformers' function that makes the mask of a forward pass, and read that mask once.

    The result is None without padding, otherwise the mask of keys. A static cache always has a mask, because
    its length tells how many keys are written. If a model adds other rules to causality and windows, the
    result is a mask of scores; for example, Gemma 3's image tokens all see each other.
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
        # A sliding cache has the last keys. Copy them, so that the caller cannot change the mask.
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
    """Whether a mask differs from causality, windows and packed sequences, because the model has added a
    function of its own or blocks.

    With ``use_bidirectional_attention`` the attention module itself sees both ways. Then a function that says
    so adds nothing, and causality does.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    if use_vmap or both_ways:
        return use_vmap != both_ways
    return getattr(mask_function, "__qualname__", "").startswith("or_masks.")
