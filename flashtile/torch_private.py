"""All private names of torch that flashtile uses, because no public name does the same.

The rest of the package takes them from here. ``tests/test_private_names.py`` lists them, and says what breaks
without each. They are in torch 2.11 to 2.13.

Functions that calls need are bound under another name, which costs a call nothing. Names are imported within
a function if ``import torch`` does not import their modules.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.jit import _builtins
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

OLDEST_TORCH = (2, 11)


def torch_release() -> tuple[int, ...]:
    """Return torch's release, such as (2, 13), also of its pre-releases."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


# Processes that compile kernels import this module without torch, so without its version.
if hasattr(torch, "__version__") and torch_release() < OLDEST_TORCH:  # it lacks names below
    raise ImportError(f"flashtile needs torch 2.11 or newer, this is torch {torch.__version__}")

# What observes a call. Every call of flashtile asks these first.

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes, such as fake tensors and FLOP counters."""
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""Return the active dispatch modes."""
is_traced: Callable[[], Any] = torch._C._get_tracing_state
"""Return the state of ``torch.jit.trace``, or None. ``torch.jit.is_tracing`` makes three calls in Python."""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for some type of device.

The public function needs the type of the device, which takes 0.4 us longer per call to find and pass.
"""


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is active, so that tensors may carry tangents."""
    return forward_ad._current_level >= 0


@contextlib.contextmanager
def outside_of_fake_mode() -> Iterator[None]:
    """Inside the context, tensors are real although a FakeTensorMode is active."""
    fake = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if fake is not None:
            torch._C._set_dispatch_mode(fake)


# Transforms of torch.func. Their public functions apply transforms, but tell nothing about active ones.

Transform: Any = torch._C._functorch.CInterpreter
"""Type of active transforms."""
TransformType: Any = torch._C._functorch.TransformType
"""Kinds of transforms: the values of ``transform.key()``."""
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the innermost active transform, or None."""
active_transforms: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack
"""Return the active transforms, the innermost last; None if there are none."""
is_wrapped_by_transform: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient stands for several vector-Jacobian products (``is_grads_batched=True``)."""


def interpreter() -> Any:
    """Return torch's Python object for the innermost transform, which can ``lower()`` to the next one."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    return retrieve_current_functorch_interpreter()


def unwrapped(tensor: Any, level: int) -> Any:
    """Unwrap ``tensor`` by the transform of a level: return what the enclosing transform sees."""
    if isinstance(tensor, Tensor) and torch._C._functorch.maybe_get_level(tensor) == level:
        return torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_mapped(tensor: Tensor) -> bool:
    """Return whether vmap maps over a tensor, so that its data cannot be read."""
    while is_wrapped_by_transform(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


# torch.compile. Its public decorators, in torch.compiler, import the compiler, which takes seconds.


def is_compiler_loaded() -> bool:
    """Whether torch.compile may have been used: its tracer is imported."""
    return "torch._dynamo" in sys.modules


def run_at_trace_time(function: Any) -> Any:
    """Let torch.compile run ``function`` instead of tracing it, as ``assume_constant_result`` does."""
    function._dynamo_marked_constant = True
    return function


def never_compiled(reason: str) -> Callable[[Any], Any]:
    """Return a decorator: torch.compile does not trace the function, as with ``torch.compiler.disable``."""

    def decorate(function: Any) -> Any:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason
        return function

    return decorate


def break_graph(reason: str) -> None:
    """Break the graph that torch.compile is tracing. There is no public function for this."""
    torch._dynamo.graph_break(reason)


def comptime() -> Any:
    """Return the function of torch.compile that runs a function with the tracer's own variables."""
    from torch._dynamo.comptime import comptime

    return comptime


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def activation_memory_budget() -> float:
    """Return the setting of torch.compile that decides what graphs save for the backward pass."""
    from torch._functorch import config

    budget: float = config.activation_memory_budget
    return budget


def tensor_guards(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Return torch.compile's check, in C++, whether other tensors are like these."""
    kind: Any = torch._C._dynamo.guards.TensorGuards
    check: Callable[..., bool] = kind(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check
    return check


# Tensors.

share_storage: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Whether two tensors use the same storage, also those whose addresses cannot be read, as fake ones."""
has_no_memory: Callable[[Tensor], bool] = Tensor._is_zerotensor
"""Whether a tensor is one of torch's zero tensors. Autograd makes them."""
negated_view: Callable[[Tensor], Tensor] = torch._neg_view
"""Return a view with the opposite sign. Public functions return such views only of complex tensors."""
check_in_graph: Callable[..., None] = torch._check
"""Raise an error unless a condition on sizes holds. It becomes part of a graph that is being traced."""
UNNAMED_MOVES = torch.ops.aten._to_copy, torch.ops.aten._unsafe_view
"""Operators that a dispatch mode sees for ``Tensor.to`` and for some products of matrices."""

_LIBRARIES = {"cpu": "mkldnn", "cuda": "cuda"}
"""torch's names of the libraries that multiply matrices, by type of device."""
matmul_precision: Callable[[], str] = functools.partial(
    torch._C._get_fp32_precision_getter, _LIBRARIES["cpu"], "matmul"
)
"""Return the precision of products of float32 on the CPU. The public property takes two calls in Python."""
set_matmul_precision: Callable[[str], Any] = functools.partial(
    torch._C._set_fp32_precision_setter, _LIBRARIES["cpu"], "matmul"
)
"""Set this precision."""


def rounds_products(device_type: str) -> bool:
    """Whether torch rounds the factors of float32 products: ``set_float32_matmul_precision``, or autocast.

    The answer is a constant of graphs that torch.compile traces. Both settings are guards of such graphs.
    """
    library = _LIBRARIES.get(device_type)
    if library is None:
        return False
    precision: str = torch._C._get_fp32_precision_getter(library, "matmul")
    return precision not in ("none", "ieee") or torch.is_autocast_enabled(device_type)


# What torch.compiler.assume_constant_result does; the function itself imports all of Dynamo.
rounds_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Devices.

cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Return this thread's current device. torch.cuda's function first checks whether CUDA is initialised."""
cuda_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""Return the address of a device's current stream. The public function creates an object, which takes 0.3 us.

Builds of torch for the CPU have neither of these two.
"""
cpu_flash_forward: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu
"""torch's attention kernel for the CPU. The public function returns no lse."""
cpu_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
cuda_sleep: Callable[[int], None] = torch.cuda._sleep
"""Keep the current stream busy for a number of cycles."""


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether this build of torch has fast matrix products in a 16-bit dtype on this processor.

    ``torch.cpu.get_capabilities`` knows the processor, but not the build. Builds without oneDNN have no such
    functions.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# Registries, which have no public way to take something out.


def flash_implementations() -> dict[str, Callable[..., Any]]:
    """Return torch's flash attention implementations: the function that activates each, by its name."""
    from torch.nn.attention import _registry

    known: dict[str, Callable[..., Any]] = _registry._FLASH_ATTENTION_IMPLS
    return known


def torchscript_builtins() -> dict[int, str]:
    """Return TorchScript's names of functions that are operators, by the functions' ids."""
    table: dict[int, str] = _builtins._get_builtin_table()
    return table


# Several GPUs.


def symmetric_memory() -> Any:
    """Return the module for memory that all ranks map. It has no public name yet."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def store_of(group: Any) -> Any:
    """Return the key-value store of a process group, which its ranks share."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def flattened(mesh: Any) -> Any:
    """Return a device mesh of one dimension with the ranks of ``mesh``."""
    return mesh._flatten()
