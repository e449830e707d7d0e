"""``attn_implementation="flashtile"`` for Hugging Face Transformers, after :func:`register` has been called.

:mod:`flashtile.integrations.transformers_attention` computes the attention. In compiled models and over
pages, Transformers' own code for flash implementations calls ``dense``, ``varlen`` and ``with_kvcache``
instead of FlashAttention's functions. That code passes only arguments that a function's signature names.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile.api.attention import flash_attn_func, flash_attn_varlen_func
from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.checks.arguments import renamed
from flashtile.checks.conversions import check_flag
from flashtile.integrations import transformers_private as private
from flashtile.integrations.transformers_attention import names_in_config, serving, serving_by_name
from flashtile.integrations.transformers_masks import WITHOUT_WINDOWS, mask_of_keys
from flashtile.integrations.transformers_prompts import SharedPrompts, shared_prompts
from flashtile.integrations.transformers_statistics import Statistics, statistics

__all__ = ["SharedPrompts", "Statistics", "register", "shared_prompts", "statistics", "unregister"]

NAMES = ("flashtile", "flashtile_2")
"""Two names of one implementation. Transformers' continuous batching decodes over pages only if a name ends
in 2 or 3."""

LITERAL_NAMES = ("flash_attention_2", "flash_attention_3")
"""Transformers' own names of FlashAttention's packages."""

BIASED = ("t5", "mt5", "umt5")
"""Model types whose position bias is the only reason why they support no flash implementation."""

WITH_OWN_MASKS = ("gemma3", "paligemma")
"""Model types that Transformers 5.24 excludes from flash attention, because its code drops their masks."""

WINDOWLESS = ("gpt_neo",)
"""Model types whose code for flash implementations ignores the model's windows. They are refused."""

_PAGED = tuple(f"paged|{name}" for name in NAMES)  # Transformers' own spelling before 5.20


def register(as_flash_attention: bool = False) -> None:
    """Register ``attn_implementation="flashtile"`` in Transformers. A second call changes nothing.

    ``from_pretrained``, ``from_config`` and ``model.set_attn_implementation`` then accept the name. flashtile
    supports padding on either side, static caches, windows, soft-caps, sinks, packed ``position_ids``, the
    position bias of T5, mT5 and UMT5 with its gradient, and ``generate_batch``. For ``generate_batch`` on a
    GPU, use the name ``"flashtile_2"``, which reads the paged cache in place.

    Args:
        as_flash_attention: also serve the names ``"flash_attention_2"`` and ``"flash_attention_3"`` that code
            or ``config.json`` may contain, on any device. The model's config keeps the original name. An
            installed flash-attn package is then not used. To change this setting, call :func:`unregister`
            first.

    Selecting the name raises a ValueError for :data:`WINDOWLESS` model types. It also does so for models that
    support no flash implementation, unless their type is in :data:`BIASED` or :data:`WITH_OWN_MASKS`.

    ``output_attentions=True`` raises a NotImplementedError with packed sequences. Otherwise a second pass
    over queries and keys computes the attention weights before dropout. The weights have no gradient, and the
    weights of padded queries are undefined. A mask (batch, heads or 1, seqlen_q, seqlen_k) made by the model
    or its user is read element by element.

    Raises:
        ModuleNotFoundError: Transformers is not installed.
        NotImplementedError: Transformers is older than 5.17.
        RuntimeError: flashtile is already registered with another ``as_flash_attention``.

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
    modeling = _modeling()
    literal = LITERAL_NAMES if as_flash_attention else ()
    current = private.loader()
    if isinstance(current, _Loader):
        if current.literal != literal:
            raise RuntimeError(
                "as_flash_attention must be the same in all calls of register: call unregister() to change it"
            )
        return
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    mask = mask_of_keys(flash_attention_mask)
    forwards = dict.fromkeys(NAMES + literal, serving(flash_attention_forward))
    if any(name.startswith("paged|flash") for name in modeling.ALL_ATTENTION_FUNCTIONS):
        from transformers.integrations.flash_paged import paged_attention_forward

        forwards |= dict.fromkeys(_PAGED, paged_attention_forward)
    private.replace_loader(_Loader(current, literal))
    for name, function in forwards.items():
        modeling.AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    model = modeling.PreTrainedModel
    setattr(model, private.CHOICE, _admitting(getattr(model, private.CHOICE), literal))


def unregister() -> None:
    """Undo :func:`register`."""
    modeling, current = _modeling(), private.loader()
    if not isinstance(current, _Loader):
        return
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    private.replace_loader(current.original)
    for name in current.literal:
        modeling.AttentionInterface.register(name, flash_attention_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)
    for name in NAMES + _PAGED:
        private.forget(modeling.AttentionInterface, name)
        private.forget(AttentionMaskInterface, name)
    model = modeling.PreTrainedModel
    setattr(model, private.CHOICE, getattr(model, private.CHOICE).__wrapped__)


def _under_transformers_names(function: Callable[..., Any], *hidden: str) -> Callable[..., Tensor]:
    """Wrap a function: rename its argument ``sink`` to ``s_aux``, and omit ``hidden`` from its signature."""

    @functools.wraps(function)
    def call(*arguments: Any, s_aux: Tensor | None = None, **named: Any) -> Any:
        try:
            return function(*arguments, sink=s_aux, **named)
        except NotImplementedError as error:
            raise renamed(error, names_in_config()) from None

    parameters = [
        parameter.replace(name="s_aux") if parameter.name == "sink" else parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in hidden
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


dense = _under_transformers_names(flash_attn_func)
varlen = _under_transformers_names(flash_attn_varlen_func)
with_kvcache = _under_transformers_names(flash_attn_with_kvcache, "max_seqlen_q")
"""The signature hides ``max_seqlen_q``, so that Transformers does not pass it. Transformers' continuous
batching decodes one query per sequence, so the argument is not needed."""


class _Loader:
    """Replacement of Transformers' loader of an implementation's functions.

    Returns flashtile's functions for ``NAMES`` and for the names ``literal``. For other names it calls
    Transformers' own loader.
    """

    def __init__(self, original: Callable[..., Any], literal: tuple[str, ...]) -> None:
        self.original, self.literal = original, literal
        self.served = NAMES + _PAGED + literal

    def __call__(self, implementation: str | None, *arguments: Any, **named: Any) -> Any:
        if implementation in self.served:
            return dense, varlen, with_kvcache, *private.padding_functions()
        return self.original(implementation, *arguments, **named)


def _admitting(check: Callable[..., Any], literal: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap Transformers' function that chooses an implementation, so that models accept flashtile's names.

    For the names in ``literal``, Transformers would require the flash-attn package. Therefore they are
    replaced by "flashtile" while Transformers checks the name.

    A model that supports no flash implementation is refused, because terms that it adds to its scores could
    be lost. Models in ``BIASED`` and ``WITH_OWN_MASKS`` are accepted, because they pass these terms and masks
    to the attention function.
    """

    @functools.wraps(check)
    def choose(self: Any, attn_implementation: str | None, *arguments: Any, **named: Any) -> Any:
        requested = attn_implementation
        if requested in literal:
            attn_implementation = NAMES[0]
        if attn_implementation in NAMES + _PAGED:
            model, kind = type(self), self.config.model_type
            served = private.supports_flash(model) or kind in BIASED + WITH_OWN_MASKS
            if not served or kind in WINDOWLESS:
                raise ValueError(
                    'attn_implementation must be "sdpa" or "eager" for '
                    f"{model.__name__}, which supports no flash attention, got {requested!r}"
                )
            if not private.passes_window(model):
                WITHOUT_WINDOWS.add(kind)
            private.list_as_compatible(model, NAMES)
            private.lend_attention(sys.modules[model.__module__], serving_by_name)
        chosen = check(self, attn_implementation, *arguments, **named)
        return requested if requested in literal else chosen

    return choose


def _modeling() -> Any:
    """Return Transformers' module ``modeling_utils``."""
    try:
        import transformers
        from transformers import modeling_utils
    except ModuleNotFoundError:
        text = "flashtile.integrations.transformers needs transformers: pip install 'flashtile[hf]'"
        raise ModuleNotFoundError(text) from None
    major, minor = (int(number) for number in transformers.__version__.split(".")[:2])
    if (major, minor) < (5, 17):
        raise NotImplementedError(f"transformers must be 5.17 or newer, got {transformers.__version__}")
    return modeling_utils
