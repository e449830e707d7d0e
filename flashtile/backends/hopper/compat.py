"""The one place that knows what differs between the Gluon of the Triton releases that flashtile runs on."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared memory as another dtype, shape and layout: a method whose name depends on the release."""
    dtype, layout = core._unwrap_if_constexpr(dtype), core._unwrap_if_constexpr(layout)
    return _semantic.memdesc_reinterpret(memory, dtype, [core._unwrap_if_constexpr(n) for n in shape], layout)
