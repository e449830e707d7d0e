"""The attention backend that vLLM imports when ``CUSTOM`` is selected. This module needs vLLM.

vLLM's ``Attention`` layer calls ``Impl.do_kv_cache_update``, which writes new keys and values into the
layer's cache, and then ``Impl.forward``. ``Builder.build`` prepares the lengths once a step for all layers of
a kind. None of these methods synchronises with the GPU, and kernels are chosen by shapes, never by lengths.
So vLLM may capture the methods in CUDA graphs.

A layer calls internal operators directly: see :mod:`flashtile.integrations.paged`.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flashtile.api.attention import flash_attn_func, flash_attn_varlen_func
from flashtile.integrations.paged import INVARIANT_QUERIES, PagedAttention, Step, rounded_queries
from flashtile.integrations.paged_groups import SharedBlocks
from flashtile.integrations.vllm import releases
from flashtile.integrations.vllm.ahead import Group, impls_of, limits_of, warm_up
from flashtile.integrations.vllm.private import scales_of, scales_on_host
from flashtile.problems.decode import FP8, MAX_HEAD_DIM

CASCADE = "FLASHTILE_CASCADE_ATTENTION"
"""Environment variable: with 1, blocks that sequences share are read once for each group of sequences."""
FP8_DTYPES = ("fp8", "fp8_e4m3")
"""vLLM's names for the cache dtype float8_e4m3fn."""
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Dtypes of models, and vLLM's name for a cache of each dtype."""
WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
NO_SCALES = None, None


class Common:
    """The support that is the same for all kinds of layers."""

    supported_dtypes: ClassVar = list(DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the layer looks up AttentionBackendEnum[get_name()]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        """Return multiples of 16. The kernels accept any block size, but are slow with smaller blocks."""
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability >= (8, 0)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        """Return the reason why these settings cannot be combined, or None if they can."""
        if kv_cache_dtype not in DTYPES.values() or kv_cache_dtype == DTYPES.get(dtype):
            return None
        return f"a cache that is not FP8 must have the model's dtype {dtype}, got {kv_cache_dtype}"


class Backend(Common, AttentionBackend):
    """The class that vLLM selects. It states what the backend supports; vLLM rejects everything else."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8_DTYPES]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return releases.cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return releases.stride_order(include_num_layers_dimension)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *WITHOUT_CACHE)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class Metadata(Step, AttentionMetadata):
    """Lengths and cache positions of one step. Fields are named as in vLLM's own backends.

    Tensors are views of vLLM's buffers.
    """

    max_encoder_len: int
    """Upper bound of a sequence's length in layers without a cache.

    It is the same in all steps if results must not depend on the batch.
    """
    max_seq_len: int
    slot_mapping: Tensor
    causal: bool
    is_all_new: bool
    """Whether all keys of all sequences are tokens of this step, as in the first chunks of prompts."""


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes the :class:`Metadata` of each step, on the host.

    The constructor compiles the kernels of all steps (:mod:`flashtile.integrations.vllm.ahead`).
    """

    _cudagraph_support: ClassVar = releases.graph_support()
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True
    _shared: SharedBlocks | None = None
    """Finds the groups of a step. None: no layer reads shared blocks once."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.min_queries = self.min_encoder_len = 0
        if envs.VLLM_BATCH_INVARIANT:
            self.min_queries = INVARIANT_QUERIES
            self.min_encoder_len = vllm_config.scheduler_config.max_num_batched_tokens
        # For some kinds of layers vLLM makes a subclass, whose method needs more of a batch than this one.
        build = partial(Builder.build, self, 0)
        groups = cascades() and any(impl.takes_groups for impl in impls_of(vllm_config, layer_names))
        group = Group(build, self.min_queries, kv_cache_spec, vllm_config, torch.device(device), groups)
        warm_up(group, layer_names)
        if groups:
            most = limits_of(group).max_num_seqs
            self._shared = SharedBlocks(most, kv_cache_spec.block_size, group.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Return the step's metadata. ``max_query_len`` is rounded up to a power of two.

        Raises:
            NotImplementedError: some sequences are causal and others are not.
        """
        common = common_attn_metadata
        # Layers with chunked local attention pass NumPy integers.
        num_reqs, num_tokens = int(common.num_reqs), int(common.num_actual_tokens)
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("causal must be one bool for all sequences, got a tensor")
        queries = rounded_queries(int(common.max_query_len), self.min_queries)
        step = Metadata(
            num_actual_tokens=num_tokens,
            max_query_len=queries,
            max_encoder_len=max(queries, self.min_encoder_len),
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            max_seq_len=int(common.max_seq_len),
            seq_lens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
            is_all_new=_is_all_new(common, num_reqs),
            is_one_query_each=queries == 1 and num_tokens == num_reqs,
        )
        self._find_groups(step)
        return step

    def _find_groups(self, step: Metadata) -> None:
        """Let layers read blocks that sequences of the step share once for each group.

        Whether the step has groups depends on its sizes only, as a captured step's replays have other blocks.
        """
        if self._shared is not None and step.causal:
            step.groups = self._shared.find(step)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Return the metadata of a captured step. Its layers read the cache, as all replays may have to."""
        captured = self.build(0, common_attn_metadata)
        captured.is_all_new = False
        return captured

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """Return a copy of the metadata with the block table and slots of another group of layers."""
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table[: len(metadata.seq_lens)], slot_mapping
        updated.groups = None
        self._find_groups(updated)
        return updated

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Do nothing, because the lengths are views, and all else also holds for longer sequences."""


def cascades() -> bool:
    """Whether the user wants blocks that sequences share to be read once for each group.

    Raises:
        ValueError: the variable is neither 0 nor 1, or batch-invariant mode is on as well.
    """
    given = os.environ.get(CASCADE, "0")
    if given not in ("0", "1"):
        raise ValueError(f"{CASCADE} must be 0 or 1, got {given!r}")
    if given == "1" and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(f"{CASCADE} must be 0 with VLLM_BATCH_INVARIANT=1, got {given!r}")
    return given == "1"


def _is_all_new(common: Any, num_reqs: int) -> bool:
    """Whether the tokens of a step are all keys of its sequences, of which one has several tokens.

    vLLM's lengths on the host are upper bounds. No sequence has fewer keys than tokens in the step, so if the
    bounds add up to the number of tokens, they are exact.
    """
    lengths = common.seq_lens_cpu_upper_bound
    return (
        common.max_seq_len == common.max_query_len > 1
        and lengths is not None
        and len(lengths) == num_reqs
        and int(lengths.sum()) == int(common.query_start_loc_cpu[num_reqs])
    )


class Impl(AttentionImpl[Metadata], PagedAttention):
    """Attention of one layer."""

    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            allowed = ", ".join(Backend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype must be one of {allowed}, got {kv_cache_dtype}")
        for name in ("dcp_world_size", "pcp_world_size"):
            if getattr(self, name, 1) > 1:
                raise NotImplementedError(f"{name} must be 1, got {getattr(self, name)}")
        for name, value in others.items():
            if value is not None:
                raise NotImplementedError(f"{name} must be None, got {value!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        device = torch.get_default_device()  # vLLM makes its layers under the model's device
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks, self.softcap = sinks, float(logits_soft_cap or 0.0)
        left = -1 if sliding_window is None else sliding_window - 1
        self.window = left, left
        self.has_cache = attn_type not in WITHOUT_CACHE
        sizes = num_heads, head_size, head_size
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        PagedAttention.__init__(self, self.scale, self.softcap, left, invariant, sizes)
        self.scales: tuple[Tensor, Tensor] | None = None
        self._filled: tuple[float, float] | None = None
        if kv_cache_dtype in FP8_DTYPES and self.has_cache:
            ones = torch.ones(2, self.num_kv_heads, dtype=torch.float32, device=device)
            k_scale, v_scale = ones.unbind()
            self.scales = k_scale, v_scale
            self._filled = 1.0, 1.0
        is_own = attn_type == AttentionType.DECODER and kv_sharing_target_layer_name is None
        self.takes_new = is_own and self.scales is None and not invariant
        """Whether steps whose keys are all new may attend to ``key`` and ``value`` instead of the cache.

        An FP8 cache has rounded them. In batch-invariant mode a sequence gives the same bits in all steps.
        """
        self.takes_groups = attn_type == AttentionType.DECODER and left < 0 and alibi_slopes is None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values (tokens, heads_kv, head_size) to their slots of the cache.

        ``slot_mapping`` (n,) int64 contains the slots of the first n tokens. Tokens with a negative slot are
        not written.
        """
        if self.has_cache:
            self.append(key, value, (kv_cache,), slot_mapping, *self._scales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query (tokens, heads, head_size) to ``output``, and return ``output``.

        Rows after the step's tokens are padding. vLLM passes no metadata while it measures memory; ``output``
        is then filled with 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale and output_block_scale must be None, got a tensor")
        step = attn_metadata
        if step is None:
            return output.fill_(0)
        if not self.has_cache or (step.is_all_new and self.takes_new):
            self._attend_to_new(query, key, value, output, step)
            return output
        self.attend(
            query, (kv_cache,), output, step, step.causal, self.alibi_slopes, self.sinks, *self._scales(layer)
        )
        return output

    def _attend_to_new(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, step: Metadata
    ) -> None:
        """Compute attention to the step's own keys and values, without the cache."""
        given = query, key, value, output
        options: dict[str, Any] = {
            "softmax_scale": self.scale, "causal": step.causal and self.has_cache, "softcap": self.softcap,
            "window_size": self.window, "alibi_slopes": self.alibi_slopes, "sink": self.sinks,
        }  # fmt: skip
        if self.has_cache and step.seq_lens.shape[0] == 1:  # no offsets to read, no padding to fill with 0
            q, k, v, out = (tensor[None, : step.num_actual_tokens] for tensor in given)
            flash_attn_func(q, k, v, out=out, **options)
        else:
            q, k, v, out = given
            offsets, most = step.query_start_loc, step.max_encoder_len
            flash_attn_varlen_func(q, k, v, offsets, offsets, most, most, out=out, **options)

    def _keys_and_values(self, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return views of the layer's keys and values."""
        memory = cache[0] if self.scales is None else cache[0].view(FP8)
        return releases.keys_and_values(memory, self.head_size)

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales (heads_kv,) of the layer's keys and values if the cache is FP8.

        vLLM has either one scale per head, which is returned, or one scale per layer. A scale per layer is
        written to all elements of ``self.scales``, but only if it has changed. The comparison uses vLLM's
        copy of the scale on the host.
        """
        if self.scales is None:
            return NO_SCALES
        of_keys, of_values = scales_of(layer)
        if of_keys.numel() == self.num_kv_heads:
            return of_keys.view(-1), of_values.view(-1)
        given = scales_on_host(layer)
        if given != self._filled:
            for scale, number in zip(self.scales, given, strict=True):
                scale.fill_(number)
            self._filled = given
        return self.scales
