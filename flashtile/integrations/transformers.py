"""``attn_implementation="flashtile"`` for Hugging Face Transformers, once :func:`register` has been called.

Transformers' own code for its flash implementations removes padding, packs and casts. It gets our functions
where it would load FlashAttention's. It passes on only what a function names, so that the ones here take
Transformers' names: ``s_aux`` is the attention sink.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.attn.functional import attention, flash_attn_func, flash_attn_varlen_func
from flashtile.checks.arguments import renamed
from flashtile.decode.functional import flash_attn_with_kvcache
from flashtile.padding import as_cells

NAMES = ("flashtile", "flashtile_2")
"""Both are the same. Continuous batching decodes over pages only where a name ends in 2 or 3."""

LITERAL_NAMES = ("flash_attention_2", "flash_attention_3")
"""Transformers' own, for FlashAttention's packages."""

BIASED = ("t5", "mt5", "umt5")
"""Model types that support no flash implementation only because they add a bias to their scores."""

_PAGED = tuple(f"paged|{name}" for name in NAMES)  # Transformers' own spelling before 5.20
_IN_CONFIG = {
    "dropout_p": "dropout_p (attention_dropout or attention_probs_dropout_prob in the model's config)"
}


def register(as_flash_attention: bool = False) -> None:
    """Make ``attn_implementation="flashtile"`` known to Transformers. A second call changes nothing.

    ``from_pretrained``, ``from_config`` and ``model.set_attn_implementation`` take the name. Served are
    padding on either side, static caches, windows, soft-caps, sinks, packed ``position_ids``, the position
    bias of T5, mT5 and UMT5 with its gradient, and ``generate_batch``: on a GPU as ``"flashtile_2"``, which
    attends to the pages where they lie.

    Args:
        as_flash_attention: serve ``"flash_attention_2"`` and ``"flash_attention_3"``, too, as code and
            ``config.json`` have them, on any device; the model's config keeps the name that it was given. An
            installed flash-attn package is not used then. :func:`unregister` first, to change it.

    A model refuses what flashtile does not serve: with a ValueError if it supports no flash implementation
    and is not one of :data:`BIASED`; with a NotImplementedError ``output_attentions=True`` where sequences
    are packed. For others a second pass over queries and keys gives the weights, before dropout; they have no
    gradient, and those of padded queries mean nothing.
    A mask of its own, (batch, heads or 1, seqlen_q, seqlen_k), is read as it is.

    Raises:
        ModuleNotFoundError: Transformers is not installed.
        NotImplementedError: it is older than 5.17.
        RuntimeError: it is registered already with another ``as_flash_attention``.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from flashtile.integrations.transformers import register
        >>> register()
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2,
        ... )
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile")
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    loading, modeling = _modules()
    literal = LITERAL_NAMES if as_flash_attention else ()
    if isinstance(loading._lazy_imports, _Loader):
        if loading._lazy_imports.literal != literal:
            raise RuntimeError("register was called with another as_flash_attention: unregister() first")
        return
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    mask = _with_static_caches(flash_attention_mask)
    forwards = dict.fromkeys(NAMES + literal, _checked(flash_attention_forward))
    if any(name.startswith("paged|flash") for name in modeling.ALL_ATTENTION_FUNCTIONS):
        from transformers.integrations.flash_paged import paged_attention_forward

        forwards |= dict.fromkeys(_PAGED, paged_attention_forward)
    loading._lazy_imports = _Loader(loading, literal)
    for name, function in forwards.items():
        modeling.AttentionInterface.register(name, function)
        if name not in literal:
            _masks().register(name, mask)
    model = modeling.PreTrainedModel
    model._check_and_adjust_attn_implementation = _admitting(
        model._check_and_adjust_attn_implementation, literal
    )


def unregister() -> None:
    """Leave Transformers as it was before :func:`register`."""
    loading, modeling = _modules()
    if not isinstance(loading._lazy_imports, _Loader):
        return
    served = NAMES + _PAGED + loading._lazy_imports.literal
    if loading._lazy_imports.literal:
        from transformers.integrations.flash_attention import flash_attention_forward

        for name in loading._lazy_imports.literal:
            modeling.AttentionInterface.register(name, flash_attention_forward)
    loading._lazy_imports = loading._lazy_imports.original
    if loading._loaded_implementation in served:
        loading._loaded_implementation = None
    for name in NAMES + _PAGED:
        modeling.AttentionInterface._global_mapping.pop(name, None)
        _masks()._global_mapping.pop(name, None)
    model = modeling.PreTrainedModel
    model._check_and_adjust_attn_implementation = model._check_and_adjust_attn_implementation.__wrapped__


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """:func:`flashtile.flash_attn_func` under Transformers' names."""
    try:
        return flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
            deterministic=deterministic, sink=s_aux,
        )  # fmt: skip
    except NotImplementedError as error:
        raise renamed(error, _IN_CONFIG) from None


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """:func:`flashtile.flash_attn_varlen_func` under Transformers' names."""
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, deterministic=deterministic, sink=s_aux,
        )  # fmt: skip
    except NotImplementedError as error:
        raise renamed(error, _IN_CONFIG) from None


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """:func:`flashtile.flash_attn_with_kvcache` under Transformers' names, for continuous batching."""
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, sink=s_aux,
    )  # fmt: skip


class _Loader:
    """What Transformers loads an implementation's functions by: ours under our names and ``literal`` ones,
    its own otherwise."""

    def __init__(self, loading: Any, literal: tuple[str, ...]) -> None:
        self.original, self.literal = loading._lazy_imports, literal
        self.padding = loading._pad_input, loading._unpad_input

    def __call__(self, implementation: str | None, *arguments: Any, **named: Any) -> Any:
        if implementation in NAMES + _PAGED + self.literal:
            return dense, varlen, with_kvcache, *self.padding
        return self.original(implementation, *arguments, **named)


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' flash attention, refusing what it would leave out or trip over."""

    @functools.wraps(forward)
    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
        cells = attention_mask is not None and attention_mask.dim() == 4
        if cells or named.get("output_attentions") or named.get("position_bias") is not None:
            return _attend(module, query, key, value, attention_mask, **named)
        return forward(module, query, key, value, attention_mask, **named)

    return attention


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out, weights) under a mask of scores, with a bias of theirs, or with the weights: out (batch, seqlen,
    heads, head_dim), weights (batch, heads, seqlen, keys) or None.

    A mask of four dimensions says what causality and windows hide, too. One of two dimensions is of keys, and
    shorter than a static cache, of which only so many have been written.
    """
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    reach = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any]
    of_scores = attention_mask is not None and attention_mask.dim() == 4
    _refuse_packed(cache, None if of_scores else position_ids, len(q), others)
    if attention_mask is not None and of_scores:
        options = as_cells(attention_mask[..., : k.shape[1]], k.shape[1])
    else:
        causal = _is_causal(module) if is_causal is None else is_causal
        options = {"causal": causal, "window_size": (reach, -1 if causal else reach)}
        if attention_mask is not None:
            keys = attention_mask[:, : k.shape[1]].bool()
            k, v = k[:, : keys.shape[1]], v[:, : keys.shape[1]]
            if reach < 0:
                options["key_padding_mask"] = keys
            else:
                options = {"mask": _without_padding(keys, q.shape[1], causal, reach)[:, None]}
    if position_bias is not None:
        position_bias = position_bias[..., : k.shape[1]]
        options["bias"] = position_bias + options["bias"] if "bias" in options else position_bias
    options |= {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "sink": s_aux}
    found: Any = attention(q, k, v, return_attn_weights=output_attentions, **options)
    return found if output_attentions else (found, None)


def _refuse_packed(cache: Any, position_ids: Tensor | None, batch: int, others: dict[str, Any]) -> None:
    restarts = position_ids is not None and batch == 1 and bool((position_ids.diff() < 0).any())
    if cache is not None or restarts or any("cu_seq" in n and t is not None for n, t in others.items()):
        raise NotImplementedError(
            "output_attentions must be False, and there must be no position bias or mask of scores, where "
            'sequences are packed or lie in pages: use model.set_attn_implementation("eager") for them'
        )


def _is_causal(module: Any) -> bool:
    """Of a module that attends. In Transformers 5.17 UMT5's decoder does not say that it is."""
    biased_decoder = getattr(module, "is_decoder", False) and getattr(
        module, "has_relative_attention_bias", False
    )
    return module.is_causal or biased_decoder


def _with_static_caches(mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Transformers' mask of keys. Where it would be None over a static cache, it says how many there are.

    Without it attention would take the cache's unwritten places for keys.
    """

    @functools.wraps(mask)
    def of_keys(*arguments: Any, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
        if attention_mask is None and "allow_is_bidirectional_skip" not in named:
            written = int(named["q_offset"]) + named["q_length"] - named["kv_offset"]
            if written < named["kv_length"]:
                device = named.get("device")
                return torch.ones(named["batch_size"], written, dtype=torch.bool, device=device)
        return mask(*arguments, attention_mask=attention_mask, **named)

    return of_keys


def _without_padding(keys: Tensor, seqlen_q: int, causal: bool, reach: int) -> Tensor:
    """(batch, seqlen_q, seqlen_k): which keys a query sees, by positions that do not count padding.

    Args:
        keys: (batch, seqlen_k), True for keys that are there; of queries, as many as they are, or the last.
        reach: how far the window goes back, and ahead unless ``causal``; -1 without one.
    """
    positions = keys.cumsum(1) - 1
    if seqlen_q == keys.shape[1]:
        own = positions
    else:
        own = keys.sum(1, keepdim=True) - seqlen_q + torch.arange(seqlen_q, device=keys.device)
    distance = positions[:, None] - own[:, :, None]
    seen = keys[:, None].expand(distance.shape)
    if causal:
        seen = seen & (distance <= 0)
    if reach >= 0:
        seen = seen & (distance.abs() <= reach)
    return seen


def _admitting(check: Callable[..., Any], literal: tuple[str, ...]) -> Callable[..., Any]:
    """Transformers' choice of an implementation, with our names among those that a model may have.

    A ``literal`` name is chosen as ours would be, for Transformers would look for FlashAttention's package.

    A model that lists the flash implementations it is compatible with (they know sinks) would otherwise fall
    back to one of its list. One that supports none might lose what it adds to its scores; those of ``BIASED``
    hand it over.
    """

    @functools.wraps(check)
    def choose(self: Any, attn_implementation: str | None, *arguments: Any, **named: Any) -> Any:
        asked_for = attn_implementation
        if asked_for in literal:
            attn_implementation = NAMES[0]
        if attn_implementation in NAMES + _PAGED:
            model = type(self)
            if not self._supports_flash_attn and self.config.model_type not in BIASED:
                raise ValueError(
                    f"attn_implementation={asked_for!r}: {model.__name__} supports no flash "
                    'attention; use "sdpa" or "eager"'
                )
            listed = model._compatible_flash_implementations
            if listed and any("flash" in name for name in listed) and NAMES[0] not in listed:
                model._compatible_flash_implementations = [*listed, *NAMES]
        chosen = check(self, attn_implementation, *arguments, **named)
        return asked_for if asked_for in literal else chosen

    return choose


def _modules() -> tuple[Any, Any]:
    """Transformers' ``modeling_flash_attention_utils`` and ``modeling_utils``."""
    try:
        import transformers
        from transformers import modeling_utils
    except ModuleNotFoundError:
        text = "flashtile.integrations.transformers needs transformers: pip install 'flashtile[hf]'"
        raise ModuleNotFoundError(text) from None
    major, minor = (int(number) for number in transformers.__version__.split(".")[:2])
    if (major, minor) < (5, 17):
        raise NotImplementedError(f"transformers must be 5.17 or newer, got {transformers.__version__}")
    from transformers import modeling_flash_attention_utils

    return modeling_flash_attention_utils, modeling_utils


def _masks() -> Any:
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionMaskInterface
