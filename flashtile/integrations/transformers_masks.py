"""What Transformers' masks of keys and positions say, read once for all the layers of a model."""

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
    """A padded batch as packed sequences, where it lies: runs of tokens, and of padding without keys."""

    cu_seqlens: Tensor  # (runs + 1,) int32
    seqused_k: Tensor  # (runs,) int32, 0 for padding


class Padding:
    """What a mask of keys says, (batch, seqlen) and True for keys that are there.

    Making one waits for the device, and nothing after it does. It does not keep the mask, or both would be
    remembered for good.
    """

    def __init__(self, mask: Tensor) -> None:
        self._device, self._shape = mask.device, mask.shape
        keys = mask.bool().cpu()
        self.whole = bool(keys.all())
        """There is no padding."""
        self._lengths, self._starts = keys.sum(1), keys.int().argmax(1)
        """How many keys a sequence has, and where they begin if they are solid."""
        self.solid = self.on_left = self.on_right = self.whole
        if self.whole:
            return
        ends = self._starts + self._lengths
        self.on_left = bool((ends == keys.shape[1]).all())  # which leaves no place for padding in between
        if self.on_left:
            self.solid = True
            """The keys of each sequence lie side by side, with padding on one side or on both."""
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
        """Of each sequence the padding before its tokens, the tokens, and the padding behind them.

        Padding has queries, which see no key: their results and gradients are 0 at hardly any work, and
        nothing is copied together and back.
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
    """What was read from a tensor, and for whom it holds: each layer of one model asks once in a pass.

    A version does not count every write (numpy, ``.data``, kernels, replays of a graph), and to compare what
    the tensor holds would make every layer wait for the device. But nobody writes to it between the layers of
    a forward pass. So it is read again for a layer that asks a second time, for another model, and in a new
    pass, which begins with the making of masks.
    """

    def __init__(self, tensor: Tensor, found: Any, in_pass: int | None) -> None:
        self.found, self._in_pass, self._version = found, in_pass, _version(tensor)
        self._config: Any = None
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()

    def holds(self, tensor: Tensor, module: Any) -> bool:
        """Whether ``module``, a layer's attention, may go by it. It has asked then."""
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
"""What was read, by tensor, for as long as the tensor lives."""


def padding_of(mask: Tensor, module: Any) -> Padding:
    """What a mask of keys says. It is looked at once in a forward pass: all layers get the same tensor.

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
    """What positions that restart say, of a batch of one; None if they do not. As :func:`padding_of`."""
    packing: Packing | None = _once(positions, module, _read_positions)
    return packing


def _read_positions(positions: Tensor) -> Packing | None:
    from transformers import modeling_flash_attention_utils as flash

    if not flash._is_packed_sequence(positions, 1):
        return None
    (cu_seqlens, _), (longest, _) = flash.prepare_fa_kwargs_from_position_ids(positions)
    return Packing(cu_seqlens.int(), int(longest))


def _once(tensor: Tensor, module: Any, read: Callable[[Tensor], Any]) -> Any:
    """``read(tensor)``, again only where what is known does not hold."""
    known = _read.get(tensor)
    if known is None or not known.holds(tensor, module):
        known = _read[tensor] = _Known(tensor, read(tensor), _passes.count)
        known.holds(tensor, module)
    return known.found


def mask_of_keys(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Transformers' function that makes the mask of a forward pass, reading it on the way.

    The result is None where no key is padding; otherwise the mask of keys. Over a static cache it says how
    many keys there are: without it attention would take the cache's unwritten places for keys. What a model
    adds to causality and windows makes it a mask of scores: Gemma 3's pictures see all of themselves.
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
        # Of a sliding cache the last ones; a copy, which is the model's own.
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
    """Whether a mask is another than those of causality, windows and packed sequences: a model has joined a
    function of its own to them, or blocks. With ``use_bidirectional_attention`` its attention says that it
    sees both ways: a function that says it, too, is no more, and causality is."""
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    if use_vmap or both_ways:
        return use_vmap != both_ways
    return getattr(mask_function, "__qualname__", "").startswith("or_masks.")
