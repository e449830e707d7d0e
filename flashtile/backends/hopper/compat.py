"""Names and functions of Gluon that differ between the Triton releases on which flashtile runs."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon as plain_gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.backends.common.jit import Decorators, Deferred, source_text
from flashtile.backends.compat import gluon_aggregate, gluon_builtin, gluon_function_type, tma_addition


class GluonFunction(Deferred, gluon_function_type()):  # type: ignore[misc]
    """A ``@gluon.jit`` function that reads its source when it is needed."""


gluon: Any = Decorators(plain_gluon, GluonFunction)
_ADDITION = tma_addition()


def aggregate(cls: type) -> Any:
    """Decorate a class as Gluon's ``aggregate`` does. The types of its fields are part of kernels' keys."""
    made: Any = gluon_aggregate()(cls)
    made.__annotations__ = cls.__annotations__
    return made


def primitive(function: Any) -> Any:
    """Decorate a function that writes instructions, as Gluon's ``builtin`` does.

    Its source is part of kernels' keys.
    """
    made: Any = gluon_builtin()(function)
    made.text = source_text(function)
    return made


async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Copy elements to shared memory (cp.async), each from an address of its own."""
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
VIEWS_SPAN_TILES = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 8)
"""Whether a view of a tile in shared memory may extend over the next tiles. False from Triton 3.8 on."""


@primitive
def _async_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory by TMA. Triton 3.6 and 3.7 have no function for this."""
    coord = [_semantic.to_tensor(each).handle for each in coord]
    _semantic.builder.create_async_tma_reduce(_ADDITION, desc.handle, coord, src.handle)


async_add = getattr(tma, "async_atomic_add", None) or _async_add


@primitive
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """View shared memory with another dtype, shape and layout.

    Gluon's own method for this has different names in different releases.
    """
    given = [each.value if isinstance(each, gl.constexpr) else each for each in (dtype, layout, *shape)]
    return _semantic.memdesc_reinterpret(memory, given[0], given[2:], given[1])
