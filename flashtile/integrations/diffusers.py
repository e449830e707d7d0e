"""``set_attention_backend("flashtile")`` for Hugging Face Diffusers, after :func:`register` has been called.

Models of Diffusers compute attention in two ways. Newer models (Flux, Wan, Qwen-Image) call Diffusers'
dispatcher, which finds the backend's function by an enum member. Others (SD3, PixArt, UNets, VAEs) have the
processors of ``attention_processor.py``, which call torch's function for every backend. :func:`register`
adds flashtile to the dispatcher, and makes these processors follow the backend that was set last.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from flashtile.integrations.sdpa import sdpa

NAME = "flashtile"


def register() -> sdpa:
    """Add the attention backend "flashtile" to Diffusers. A second call changes nothing.

    ``model.set_attention_backend("flashtile")`` then selects it, as does the context manager
    ``diffusers.attention_backend("flashtile")``. The backend supports masks, gradients, and the dtypes and
    devices of :func:`flashtile.attention`. Diffusers' own context parallelism is refused.

    Returns:
        An object with counters: ``served`` is the number of calls that flashtile computed, and ``passed``
        counts the calls that it left to torch, by reason.

    Raises:
        ModuleNotFoundError: Diffusers is not installed.
        NotImplementedError: Diffusers is older than 0.37.

    Examples:
        >>> from diffusers import SD3Transformer2DModel
        >>> from flashtile.integrations.diffusers import register
        >>> door = register()
        >>> model = SD3Transformer2DModel(
        ...     sample_size=8, patch_size=2, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        ...     caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, in_channels=4,
        ... )
        >>> model.set_attention_backend("flashtile")
        >>> text, pooled = torch.randn(1, 7, 32), torch.randn(1, 64)
        >>> model(torch.randn(1, 4, 8, 8), text, pooled, torch.tensor([1])).sample.shape
        torch.Size([1, 16, 8, 8])
        >>> door.served
        1
    """
    dispatch, processors = _modules()
    if isinstance(processors.F, _Functional):
        return processors.F.door
    door = sdpa()
    backend = _add_member(dispatch.AttentionBackendName)
    registry = dispatch._AttentionBackendRegistry
    constraints = [dispatch._check_device, dispatch._check_shape]
    registry.register(backend, constraints=constraints)(_function(door))
    processors.F = _Functional(door, lambda: registry._active_backend == NAME)
    return door


def unregister() -> None:
    """Undo :func:`register`. Models that use the backend must first be set to another backend."""
    dispatch, processors = _modules()
    if not isinstance(processors.F, _Functional):
        return
    processors.F = functional
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    backend = names(NAME)
    if registry._active_backend == backend:
        registry.set_active_backend(names.NATIVE)
    for known in (registry._backends, registry._constraints, registry._supported_arg_names):
        del known[backend]
    names._member_names_.remove(backend.name)
    del names._member_map_[backend.name], names._value2member_map_[NAME]
    delattr(names, backend.name)


def _function(door: sdpa) -> Any:
    """Return the attention function that Diffusers calls for the backend NAME.

    Diffusers passes only arguments that the function's signature names.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Return attention of tensors (batch, seqlen, heads, head_dim). Other arguments are those of SDPA."""
        if return_lse or _parallel_config is not None:
            name = "return_lse" if return_lse else "parallel_config"
            raise NotImplementedError(f"{name} is not supported by Diffusers' attention backend {NAME!r}")
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            # Diffusers' own backends treat a mask of this shape as a key padding mask.
            attn_mask = attn_mask[:, None, None]
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return door.attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)

    return attend


class _Functional:
    """Replaces ``torch.nn.functional`` in Diffusers' processors.

    Its attention is flashtile's while flashtile is the active backend. All other functions are torch's.
    """

    def __init__(self, door: sdpa, is_active: Any) -> None:
        self.door, self._is_active = door, is_active

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    def scaled_dot_product_attention(self, *arguments: Any, **named: Any) -> Tensor:
        attend = self.door.attend if self._is_active() else functional.scaled_dot_product_attention
        return attend(*arguments, **named)


def _add_member(names: Any) -> Any:
    """Add the member ``FLASHTILE`` to Diffusers' enum of backends, and return it."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    member.__objclass__, member._sort_order_ = names, len(names)
    setattr(names, member.name, member)
    names._member_names_.append(member.name)
    names._member_map_[member.name] = names._value2member_map_[NAME] = member
    return member


def _modules() -> tuple[Any, Any]:
    """Return Diffusers' modules ``attention_dispatch`` and ``attention_processor``."""
    try:
        import diffusers
    except ModuleNotFoundError:
        text = "flashtile.integrations.diffusers needs diffusers: pip install 'flashtile[diffusers]'"
        raise ModuleNotFoundError(text) from None
    version = tuple(int(number) for number in diffusers.__version__.split(".")[:2])
    if version < (0, 37):
        raise NotImplementedError(f"diffusers must be 0.37 or newer, got {diffusers.__version__}")
    from diffusers.models import attention_dispatch, attention_processor

    return attention_dispatch, attention_processor
