"""All private names of Transformers that flashtile uses, because no public name does the same.

The rest of the package takes them from here. A test calls each of them, and says what a release without it
breaks.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def loader() -> Callable[..., Any]:
    """Return Transformers' function that finds the functions of a flash implementation by its name."""
    return _flash()._lazy_imports


def replace_loader(function: Callable[..., Any]) -> None:
    """Let Transformers load implementations by ``function``, and forget those of the one that it loaded."""
    _flash()._lazy_imports = function
    _flash()._loaded_implementation = None


def served_names() -> tuple[str, ...]:
    """Return the names of implementations that flashtile serves at present."""
    names: tuple[str, ...] = getattr(loader(), "served", ())
    return names


def padding_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that pad and unpad, which a loader returns next to its attention functions."""
    return _flash()._pad_input, _flash()._unpad_input


def lend_attention(module: Any, serving: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Define ``_flash_attention_forward`` in the module of a model, if the module needs this function.

    Modules that define one attention class per implementation call the function, but import it only if
    FlashAttention's package is installed.
    """
    if any(name.endswith("_ATTENTION_CLASSES") for name in vars(module)):
        vars(module)["_flash_attention_forward"] = serving(_flash()._flash_attention_forward)


def forget(interface: Any, name: str) -> None:
    """Undo ``interface.register(name, ...)``: interfaces of Transformers have no public way to do so."""
    interface._global_mapping.pop(name, None)


CHOICE = "_check_and_adjust_attn_implementation"
"""Method of ``PreTrainedModel`` that decides whether a model takes an implementation."""


def supports_flash(model: type) -> bool:
    return bool(model._supports_flash_attn)  # type: ignore[attr-defined]


def list_as_compatible(model: Any, names: tuple[str, ...]) -> None:
    """Add names to a model's list of flash implementations, if it has one.

    Models with sinks have a list, and Transformers replaces any other name by one of the list.
    """
    listed = model._compatible_flash_implementations
    if listed and any("flash" in name for name in listed) and names[0] not in listed:
        model._compatible_flash_implementations = [*listed, *names]


def implementation(config: Any) -> str | None:
    """Return the name of the attention that a config chooses."""
    name: str | None = config._attn_implementation
    return name


def is_stateful(model: Any) -> bool:
    """Whether layers of a model have a state that each token changes, as state spaces do."""
    return bool(model._is_stateful)


def is_quantized(config: Any) -> bool:
    return hasattr(config, "_is_quantized")


def collects_weights() -> bool:
    """Whether Transformers' hooks collect attention weights in this forward pass."""
    collected = _collector().get()
    return collected is not None and any("attentions" in name for name in collected)


@functools.cache
def _collector() -> Any:
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # another version of Transformers
        return contextvars.ContextVar("nothing", default=None)
    return _active_collector


def passes_window(model: type) -> bool:
    """Whether the code next to a model's class passes ``sliding_window`` to an attention function.

    The window of other models is only in their masks.
    """
    codes = [
        inspect.unwrap(member).__code__
        for cls in vars(sys.modules[model.__module__]).values()
        if inspect.isclass(cls) and cls.__module__ == model.__module__
        for member in vars(cls).values()
        if isinstance(member, FunctionType)
    ]
    return any("sliding_window" in names for code in codes for names in _keywords(code))


def _keywords(code: CodeType) -> Iterator[tuple[Any, ...]]:
    """Yield the names of keyword arguments of each call in ``code``. Python stores them as constants."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _keywords(constant)


def drops_keywords(model: nn.Module, decoder: nn.Module) -> str | None:
    """Return the class of the first module that does not pass its keyword arguments on, or None.

    Only modules on the way from ``model`` to the attention of its ``decoder`` matter. What a module drops
    never reaches the attention function, and nothing tells.
    """
    attentions = {module for module in decoder.modules() if hasattr(module, "is_causal")}
    classes: dict[Any, None] = {
        type(module): None
        for module in model.modules()
        if not isinstance(module, nn.ModuleList) and not attentions.isdisjoint(module.modules())
    }
    return next((cls.__name__ for cls in classes if not _passes_keywords(cls)), None)


@functools.cache
def _passes_keywords(cls: type) -> bool:
    """Whether ``forward`` of a module calls something with its own ``**kwargs``."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    rest = inspect.getfullargspec(forward).varkw
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:  # a class that was defined in an interpreter
        return rest is not None
    return any(
        isinstance(node, ast.keyword)
        and node.arg is None
        and isinstance(node.value, ast.Name)
        and node.value.id == rest
        for node in ast.walk(tree)
    )


class Listener(TorchFunctionMode):
    """Hears which rules a mask function of Transformers is made of, while the function is called.

    Compiled code hides what a function has captured, but not the functions of torch that it calls.

    Attributes:
        unites: whether the function is a union: ``or_masks`` begins with no key.
        looks_up: whether the function reads tensors, such as the numbers of packed sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unites = self.looks_up = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.new_zeros:
            self.unites = True
        elif function is Tensor.__getitem__:
            self.looks_up = True
        return function(*arguments, **named or {})


def _flash() -> Any:
    from transformers import modeling_flash_attention_utils

    return modeling_flash_attention_utils
