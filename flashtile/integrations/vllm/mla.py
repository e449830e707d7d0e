"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): backend ``CUSTOM`` of vLLM's two registries.

vLLM's own classes project queries and keys, write the cache, and cut long contexts of prompts into chunks.
:class:`LatentImpl` computes decoding steps over the cache of latent vectors; :class:`Prefill` computes
prompts. This module needs vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport

from flashtile.api.attention import flash_attn_varlen_func
from flashtile.integrations.vllm.backend import DTYPES, Common
from flashtile.integrations.vllm.private import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLAPrefillBackend,
    QueryLenSupport,
    prompts_of,
)
from flashtile.operators import decode as operators
from flashtile.problems.decode import CacheTensors, DecodeOptions
from flashtile.problems.masking import CAUSAL


class LatentBackend(Common, MLACommonBackend):
    """The class that vLLM selects for models with latent attention."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)


class LatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder. Sequences with equally many queries, as in speculative decoding, are decoding steps."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = QueryLenSupport.UNIFORM

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata of a step, in which no prompt loses its context."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        _merge_all_contexts(step.prefill)
        return step


def _merge_all_contexts(prompts: Any) -> None:
    """Let vLLM merge the contexts of all rows, if prompts with a context are not the first prompts.

    vLLM 0.25 counts the n prompts with a context and merges the contexts of the first n prompts. Its Model
    Runner V2 orders prompts by their new tokens, so a prompt without a context may come before one with a
    context. The context of the latter would be ignored. The lse of a row without a context is -inf, so it may
    be merged as well. Releases from 0.29 on do not count.
    """
    context: Any = getattr(prompts, "chunked_context", None)
    if getattr(context, "prefill_tokens_with_context", None) is None:
        return
    has_context = [length > 0 for length in context.seq_lens[0].tolist()]  # of the first chunk, on the host
    if has_context != sorted(has_context, reverse=True):
        context.prefill_tokens_with_context = None


class LatentImpl(MLACommonImpl[MLACommonMetadata]):
    """Attention of one layer. Decode context parallelism is vLLM's own: it merges results by their lse."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # vLLM's __new__ sets need_to_return_lse_for_decode.
        self.options = DecodeOptions(
            softmax_scale=self.scale, masking=CAUSAL, return_lse=self.need_to_return_lse_for_decode
        )

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention (tokens, heads, kv_lora_rank) of decoding steps, and its lse or None.

        The lse is (tokens, heads).

        Args:
            q: (latent, rotated) queries, or both in one tensor, next to each other.
            kv_c_and_k_pe_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim). The first columns
                of a row are the value and part of the key; the others are the rotated part of the key.
        """
        rank, step = self.kv_lora_rank, attn_metadata.decode
        latent, rotated = q if isinstance(q, tuple) else q.split([rank, self.qk_rope_head_dim], -1)
        sequences = attn_metadata.num_decodes, -1
        cache = kv_c_and_k_pe_cache.unsqueeze(2)
        tensors = CacheTensors(
            cache_seqlens=step.seq_lens,
            block_table=step.block_table,
            qv=latent.contiguous().unflatten(0, sequences),
        )
        keys_and_values = cache[..., rank:], cache[..., :rank]
        out, lse = operators.decode(
            (rotated.unflatten(0, sequences), *keys_and_values), tensors, self.options, ()
        )
        return out.flatten(0, 1), None if lse is None else lse.transpose(1, 2).flatten(0, 1)


class Prefill(MLAPrefillBackend):
    """Attention of prompts, whose keys and values are projected from the latent vectors."""

    supported_dtypes: ClassVar = list(DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability >= (8, 0)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Take the metadata of a step's prompts. The builder may be another backend's."""
        _merge_all_contexts(prefill_metadata)
        super().prepare_metadata(prefill_metadata)

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Return the causal attention of the new tokens, with ``return_softmax_lse`` also its lse.

        The lse is (heads, tokens).
        """
        if output_scale is not None:
            raise NotImplementedError("output_scale must be None, got a tensor")
        step = prompts_of(self)
        offsets, most = step.query_start_loc, step.max_query_len
        return self._attend((q, k, v), (offsets, offsets, most, most), True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Any = None,
        chunk_idx: int = 0,
        out: Tensor | None = None,
    ) -> Any:
        """Return (out, lse) of the new tokens over a chunk of earlier tokens.

        From vLLM 0.29 on ``chunk`` describes the chunk; earlier releases give its number, ``chunk_idx``.
        """
        if chunk is not None:
            lengths = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        else:
            step = prompts_of(self)
            context = step.chunked_context
            ends, most = context.cu_seq_lens[chunk_idx], context.max_seq_lens[chunk_idx]
            lengths = step.query_start_loc, ends, step.max_query_len, most
        return self._attend((q, k, v), lengths, False, True, out)

    def _attend(
        self, tensors: tuple, lengths: tuple, causal: bool, return_lse: bool, out: Tensor | None
    ) -> Any:
        q, k, v = tensors
        starts, starts_k, most, most_k = lengths
        return flash_attn_varlen_func(
            q, k, v, starts, starts_k, most, most_k, softmax_scale=self.scale, causal=causal,
            return_lse=return_lse, out=out,
        )  # fmt: skip
