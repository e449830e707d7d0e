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

from flashtile.integrations.transformers_private import Listener


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
    """Sequences that are packed one after another, in one row or in each row of a batch."""

    cu_seqlens: Tensor  # (sequences + 1,) int32
    max_seqlen: int


def packing_of(numbers: Tensor, module: Any) -> Packing | None:
    """Return the packing that ``numbers`` describe, or None if each row is one sequence.

    The numbers are read once per forward pass, like the mask in :func:`padding_of`.

    Args:
        numbers: as in :func:`documents_of`.
        module: the layer's attention module.
    """
    packing: Packing | None = _once(numbers, module, read_packing)
    return packing


def documents_of(numbers: Tensor) -> Tensor:
    """Return (batch, seqlen) ints that are equal for tokens of one sequence and increase along a row.

    Args:
        numbers: numbers of documents (batch, 1, seqlen), or positions (batch, seqlen). In a sequence, the
            positions increase.
    """
    if numbers.dim() == 3:
        return numbers[:, 0]
    return F.pad(numbers[:, 1:] <= numbers[:, :-1], (1, 0)).cumsum(1)


def read_packing(numbers: Tensor) -> Packing | None:
    """Do the same as :func:`packing_of`, but read the numbers in each call."""
    begins = F.pad(documents_of(numbers).diff(dim=1) != 0, (1, 0)).cpu()
    if not begins.any():
        return None
    begins[:, 0] = True
    offsets = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel())
    return Packing(offsets.int().to(numbers.device, non_blocking=True), int(offsets.diff().max()))


def _once(tensor: Tensor, module: Any, read: Callable[[Tensor], Any]) -> Any:
    """Return ``read(tensor)``, or its earlier result if that is still valid for ``module``."""
    known = _read.get(tensor)
    if known is None or not known.holds(tensor, module):
        known = _read[tensor] = _Known(tensor, read(tensor), _passes.count)
        known.holds(tensor, module)
    return known.found


class TreeMask(Tensor):
    """The ``attention_mask`` of a packed batch, (1, total) of ones, which nothing but a loss may read.

    Models with another attention ignore ``block_mask``, so answers would see each other. Such attention reads
    its padding mask, once per forward pass, and this class refuses that.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        index = arguments[1] if function is Tensor.__getitem__ else ()
        looks_up = any(isinstance(one, Tensor) for one in (index if isinstance(index, tuple) else [index]))
        if looks_up or function in (Tensor.all, Tensor.sum, Tensor.bool, torch.all, torch.sum):
            raise ValueError(
                'model must have attn_implementation="flashtile", and layers that pass block_mask on, to '
                "take a batch of shared_prompts: other attention ignores which answer a token belongs to. "
                'Call model.set_attn_implementation("flashtile")'
            )
        found = super().__torch_function__(function, types, arguments, named or {})
        is_mask = not isinstance(found, TreeMask) or found.dim() == 2
        return found if is_mask else found.as_subclass(Tensor)


def mask_of_keys(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap Transformers' function that makes the mask of a forward pass, so that each mask is read once.

    The wrapped function returns one of:

    - None without padding.
    - A padding mask (batch, keys). For a static cache, it covers only the keys that have been written.
    - The :class:`TreeMask` of a packed batch, as it is.
    - Numbers of documents (batch, 1, seqlen), integers, for packed sequences without padding and cache.
    - A mask with one element per score, (batch, 1, queries, keys), if the options of the attention function
      cannot say what the mask says (:func:`_needs_scores`).
    """

    from transformers.masking_utils import sdpa_mask

    @functools.wraps(original)
    def mask(*, kv_length: int, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            _passes.count += 1
        rules = _rules(**named)
        if _needs_scores(rules, kv_length, **named):
            of_keys = None if isinstance(attention_mask, TreeMask) else attention_mask
            always = {"kv_length": kv_length, "attention_mask": of_keys, "allow_is_causal_skip": False}
            return sdpa_mask(**named | always)
        if isinstance(attention_mask, TreeMask):
            return attention_mask
        if attention_mask is None and rules is not None and rules.looks_up:
            return _documents(**named)
        if attention_mask is None and "allow_is_bidirectional_skip" not in named:
            written = int(named["q_offset"]) + named["q_length"] - named["kv_offset"]
            if written < kv_length:
                device = named.get("device")
                attention_mask = torch.ones(named["batch_size"], written, dtype=torch.bool, device=device)
        if attention_mask is None or attention_mask.dim() != 2:
            return original(kv_length=kv_length, attention_mask=attention_mask, **named)
        # A sliding-window cache holds only the last keys.
        keys = attention_mask[:, -kv_length:]
        if compiling:  # compiled code cannot read the mask on the host
            return keys
        keys = keys.clone()  # because the caller may write to its mask later
        padding = Padding(keys)
        if padding.whole and keys.shape[1] == kv_length:
            return None
        _read[keys] = _Known(keys, padding, None)
        return keys

    return mask


WITHOUT_WINDOWS: set[str] = set()
"""Model types whose code does not pass windows to the attention function."""


def _rules(
    mask_function: Callable[..., Any],
    allow_is_causal_skip: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Listener | None:
    """Return what a mask function is made of, or None if it is plain.

    Transformers skips masks that are plain: causal, with a window, or bidirectional.
    """
    if allow_is_causal_skip or "allow_is_bidirectional_skip" in others:
        return None
    first = torch.zeros(1, dtype=torch.long, device=device)
    heard = Listener()
    with heard:  # Dynamo does not know the value of "as"
        mask_function(first, first, first, first)
    return heard


def _needs_scores(
    rules: Listener | None,
    kv_length: int,
    q_offset: int | Tensor = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **others: Any,
) -> bool:
    """Whether a mask needs more than padding, packed sequences, and the options for causality and windows.

    A model adds other rules with its own mask function (``use_vmap`` is then set), or with blocks of tokens
    that see each other (a union). The windows of some models are only in their masks (``WITHOUT_WINDOWS``).
    In compiled code, the position of a static cache is a tensor, so the written keys cannot be sliced.

    In models whose config has ``use_bidirectional_attention``, attention modules are not causal. If such a
    model passes its own mask function, the mask function only removes causality, and the result is False. If
    it passes none, the mask is causal although the module is not, and the result is True.
    """
    if local_size is not None and local_size < kv_length and config.model_type in WITHOUT_WINDOWS:
        return True
    if torch.compiler.is_compiling() and isinstance(q_offset, Tensor):
        return True
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    if use_vmap or both_ways:
        return use_vmap != both_ways
    return rules is not None and rules.unites


def _documents(
    mask_function: Callable[..., Any],
    batch_size: int,
    q_length: int,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """Return numbers of documents, (batch, 1, seqlen): tokens that do not see the one before begin one.

    With a window of one token, each token is a document, which means the same.
    """
    rows = torch.arange(1, q_length, device=device)
    batch = torch.arange(batch_size, device=device)[:, None]
    follows = mask_function(batch, torch.zeros_like(batch), rows, rows - 1)
    return F.pad((~follows).cumsum(1), (1, 0))[:, None]
