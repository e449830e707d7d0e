"""Contestants of decoding: attention of new tokens over a cache of keys and values, dense or in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench.inputs import Inputs
from flashtile.bench.peers import Call, FlashAttention, Flashtile
from flashtile.bench.workloads import Workload
from flashtile.problem import UNLIMITED


class Decoding(Flashtile):
    """flashtile over the cache as it is."""

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        return self.over(flashtile.flash_attn_with_kvcache, workload, inputs)

    def over(self, function: Callable[..., Any], workload: Workload, inputs: Inputs, **more: Any) -> Call:
        return over_copies(
            function, inputs, "block_table", cache_seqlens=inputs.cache_seqlens, causal=workload.causal,
            backend=self._backend, **inputs.descales, **more,
        )  # fmt: skip


class SharedPrefix(Decoding):
    """flashtile, which is told what first tokens all sequences share."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(backend)
        self.name = self.name.replace("flashtile", "flashtile-prefix")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        shares = workload.cache is not None and workload.cache.prefix
        return None if shares else "the sequences share no prefix"

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        assert workload.cache is not None
        prefix = workload.cache.prefix
        function = flashtile.flash_attn_with_shared_prefix
        return self.over(function, workload, inputs, prefix_seqlens=prefix)


class FlashAttention3(FlashAttention):
    """FlashAttention-3's interface, in the arguments that its builds have in common."""

    def __init__(self) -> None:
        super().__init__("fa3", "flash_attn_interface", UNLIMITED)
        self.needs = ("flash_attn_interface", "flash_attn_with_kvcache")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        paged = workload.cache is not None and workload.cache.page_size
        sixteen_bits = workload.cache_dtype == workload.torch_dtype and workload.torch_dtype.itemsize == 2
        taken = paged and sixteen_bits and workload.head_dim <= 256
        return None if taken else "takes 16-bit caches in pages and heads of up to 256 only"

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        import flash_attn_interface

        function = flash_attn_interface.flash_attn_with_kvcache
        given = {"cache_seqlens": inputs.cache_seqlens, "causal": workload.causal}
        return over_copies(function, inputs, "page_table", **given)


def over_copies(function: Callable[..., Any], inputs: Inputs, table_name: str, **arguments: Any) -> Call:
    """A call of ``function`` over each copy of the cache, which a block table names."""
    tables: tuple[Tensor | None, ...] = inputs.block_tables or (None,)
    copies = tuple(partial(function, **{table_name: table}, **arguments) for table in tables)
    return Call(copies[0], copies=copies)
