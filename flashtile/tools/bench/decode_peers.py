"""Contestants of decoding: attention of new tokens over a dense or paged cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile.problems.common import UNLIMITED
from flashtile.tools.bench.inputs import Inputs
from flashtile.tools.bench.peers import FlashAttention, Flashtile, Peer, PeerCall
from flashtile.tools.bench.workloads import Workload


class Decoding(Flashtile):
    """flashtile over the given cache."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return self.over(flashtile.flash_attn_with_kvcache, workload, inputs)

    def over(self, function: Callable[..., Any], workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        if inputs.qv is not None:
            more["qv"] = inputs.qv
        return over_copies(
            function, inputs, "block_table", cache_seqlens=inputs.cache_seqlens, causal=workload.causal,
            backend=self._backend, **inputs.descales, **more,
        )  # fmt: skip


class SharedPrefix(Decoding):
    """flashtile with the prefix that all sequences share passed to it."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(backend)
        self.name = self.name.replace("flashtile", "flashtile-prefix")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        shares = workload.cache is not None and workload.cache.prefix
        return None if shares else "the sequences share no prefix"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        assert workload.cache is not None
        prefix = workload.cache.prefix
        function = flashtile.flash_attn_with_shared_prefix
        return self.over(function, workload, inputs, prefix_seqlens=prefix)


class FlashAttention3(FlashAttention):
    """FlashAttention-3's interface, with the arguments that all its builds take."""

    def __init__(self) -> None:
        super().__init__("fa3", "flash_attn_interface", UNLIMITED)
        self.needs = ("flash_attn_interface", "flash_attn_with_kvcache")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        paged = workload.cache is not None and workload.cache.page_size
        sixteen_bits = workload.cache_dtype == workload.torch_dtype and workload.torch_dtype.itemsize == 2
        heads = workload.head_dim <= 256
        if workload.latent:
            heads = workload.own_columns <= 64 and 256 <= workload.width_v <= 512
        taken = paged and sixteen_bits and heads
        return None if taken else "takes 16-bit caches in pages and heads of up to 256, or MLA's, only"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        import flash_attn_interface

        function = flash_attn_interface.flash_attn_with_kvcache
        given = {"cache_seqlens": inputs.cache_seqlens, "causal": workload.causal}
        if inputs.qv is not None:
            given["qv"] = inputs.qv
        return over_copies(function, inputs, "page_table", **given)


class SdpaLatent(Peer):
    """torch's ``scaled_dot_product_attention`` on absorbed MLA.

    Before timing, pages are gathered and keys are joined. The heads that share keys are passed as rows of one
    head.
    """

    name = "sdpa-latent"

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if not workload.latent or len(set(workload.sequences)) > 1:
            return "takes absorbed MLA over sequences of one length only"
        return "its causal mask knows no heads as rows" if workload.seqlen_q > 1 else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        assert inputs.qv is not None
        q = torch.cat([inputs.q, inputs.qv], -1).unflatten(2, (workload.num_heads_kv, -1))[:, 0]

        def over(table: Tensor) -> Callable[..., Tensor]:
            pages = (cache[table].flatten(1, 2)[:, : workload.seqlen_k] for cache in (inputs.k, inputs.v))
            k, v = (t.transpose(1, 2).contiguous() for t in pages)
            joined = torch.cat([k, v], -1)
            return lambda *_: F.scaled_dot_product_attention(q, joined, v).flatten(1, 2)[:, None]

        copies = tuple(over(table) for table in inputs.block_tables)
        return PeerCall(copies[0], copies=copies)


def over_copies(function: Callable[..., Any], inputs: Inputs, table_name: str, **arguments: Any) -> PeerCall:
    """Return a call of ``function`` over each copy of the cache; each copy has its own block table."""
    tables: tuple[Tensor | None, ...] = inputs.block_tables or (None,)
    copies = tuple(partial(function, **{table_name: table}, **arguments) for table in tables)
    return PeerCall(copies[0], copies=copies)
