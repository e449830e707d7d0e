"""``attn_implementation="flashtile"`` for Hugging Face Transformers, once :func:`register` has been called.

Attention itself is :mod:`flashtile.integrations.transformers_attention`'s. In compiled models and over pages,
Transformers' own code for its flash implementations runs around our functions, which it gets where it would
load FlashAttention's. It passes on only what a function names, so that the ones here take Transformers'
names: ``s_aux`` is the attention sink.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.api.attention import flash_attn_func, flash_attn_varlen_func
from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.checks.arguments import renamed
from flashtile.checks.conversions import check_flag
from flashtile.integrations.transformers_attention import IN_CONFIG, serving
from flashtile.integrations.transformers_masks import mask_of_keys

NAMES = ("flashtile", "flashtile_2")
"""Both are the same. Continuous batching decodes over pages only where a name ends in 2 or 3."""

LITERAL_NAMES = ("flash_attention_2", "flash_attention_3")
"""Transformers' own, for FlashAttention's packages."""

BIASED = ("t5", "mt5", "umt5")
"""Model types that support no flash implementation only because they add a bias to their scores."""

LEAVING_OUT = ("gpt_neo",)
"""Model types whose code for flash implementations leaves their windows out."""

_PAGED = tuple(f"paged|{name}" for name in NAMES)  # Transformers' own spelling before 5.20


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
    and is not one of :data:`BIASED`, or is one of :data:`LEAVING_OUT`; with a NotImplementedError
    ``output_attentions=True`` where sequences are packed. For others a second pass over queries and keys
    gives the weights, before dropout; they have no gradient, and those of padded queries mean nothing.
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
    check_flag("as_flash_attention", as_flash_attention)
    loading, modeling = _modules()
    literal = LITERAL_NAMES if as_flash_attention else ()
    if isinstance(loading._lazy_imports, _Loader):
        if loading._lazy_imports.literal != literal:
            raise RuntimeError("register was called with another as_flash_attention: unregister() first")
        return
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    mask = mask_of_keys(flash_attention_mask)
    forwards = dict.fromkeys(NAMES + literal, serving(flash_attention_forward))
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
        raise renamed(error, IN_CONFIG) from None


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
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, deterministic=deterministic, sink=s_aux,
        )  # fmt: skip
    except NotImplementedError as error:
        raise renamed(error, IN_CONFIG) from None


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
            served = self._supports_flash_attn or self.config.model_type in BIASED
            if not served or self.config.model_type in LEAVING_OUT:
                raise ValueError(
                    f"attn_implementation={asked_for!r}: {model.__name__} supports no flash "
                    'attention; use "sdpa" or "eager"'
                )
            listed = model._compatible_flash_implementations
            if listed and any("flash" in name for name in listed) and NAMES[0] not in listed:
                model._compatible_flash_implementations = [*listed, *NAMES]
            _lend(sys.modules[model.__module__])
        chosen = check(self, attn_implementation, *arguments, **named)
        return asked_for if asked_for in literal else chosen

    return choose


def _lend(module: Any) -> None:
    """A model with classes of its own for each implementation calls Transformers' function by a name that its
    module imports only where FlashAttention's package is."""
    if any(name.endswith("_ATTENTION_CLASSES") for name in vars(module)):
        loading, _ = _modules()
        vars(module).setdefault("_flash_attention_forward", loading._flash_attention_forward)


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
