"""The attention backend that SGLang creates when ``flashtile`` is selected. This module needs SGLang.

SGLang prepares each step by ``init_forward_metadata``, or by ``init_forward_metadata_out_graph`` if the step
replays a CUDA graph. Then each layer calls ``forward_decode`` or ``forward_extend``, which write the new keys
and values into SGLang's pool and attend. No method synchronises with the GPU, and kernels are chosen by
shapes, never by lengths. So SGLang may capture the layers of decoding steps in CUDA graphs.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from flashtile.backends.common.device import is_capturing
from flashtile.compilation.calls import Call
from flashtile.integrations.paged import INVARIANT_QUERIES, PagedAttention, Step, rounded_queries
from flashtile.integrations.paged_calls import StepLimits, calls_in, step_calls, warm_up
from flashtile.integrations.sglang.private import (
    AttentionArch,
    AttentionType,
    KVWriteLoc,
    SWAKVPool,
    get_exec,
    get_parallel,
    get_spec,
    output_of,
)
from flashtile.problems.decode import FP8, MAX_HEAD_DIM

logger = logging.getLogger("flashtile.sglang")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NOT_CAUSAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


@dataclass
class Metadata:
    """The lengths and pages of one step."""

    step: Step
    window_step: Step | None
    """The step in the pages of the layers with a sliding window, if these layers have a pool of their own."""
    window_slots: Tensor | None
    """(tokens,) int64: where these layers write the step's keys and values."""


@dataclass
class Buffers:
    """Tensors that captured CUDA graphs read. Their addresses stay the same in all steps."""

    seq_lens: Tensor
    block_table: Tensor
    window_table: Tensor | None
    window_slots: Tensor | None


class PoolAttention(PagedAttention):
    """The calls of one layer over a pool. The last of its ``sizes`` is the number of tokens in a page."""

    def _keys_and_values(self, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers as (pages, page_size, heads_kv, head_dim), without a copy.

        The buffers are (slots, heads_kv, head_dim), or (pages, heads_kv, page_size, head_dim) in SGLang's
        layout "hnd".
        """
        keys, values = (
            buffer.permute(0, 2, 1, 3)
            if buffer.dim() == 4
            else buffer.view(-1, self.sizes[-1], *buffer.shape[1:])
            for buffer in cache
        )
        return keys, values


@dataclass
class LayerOptions:
    """Options and scales of one layer of the model."""

    attention: PoolAttention
    causal: bool
    has_window_pool: bool
    k_scale: Tensor | None
    """(heads_kv,) float32, if the cache is FP8."""
    v_scale: Tensor | None


class Backend(AttentionBackend):
    """Attention of all layers of a model over SGLang's paged pools.

    Args:
        model_runner: SGLang's ``ModelRunner``, whose pools and sizes are used.

    Raises:
        NotImplementedError: the model or the server needs what this backend does not serve.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _refuse(model_runner)
        # SGLang's layers and runners read these two attributes of the backend.
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.page_size = model_runner.page_size
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        rows = self.req_to_token_pool.req_to_token
        self.first_slots = rows[:, :: self.page_size]
        """(requests, pages) int32: the first slot of each page of each request."""
        pool = self.token_to_kv_pool
        self.has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self.invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self.min_queries = INVARIANT_QUERIES if self.invariant else 1
        self.row_starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        self.layers: dict[int, LayerOptions] = {}
        self.compiled_kinds: set[tuple] = set()
        """Kinds of layers whose kernels are compiled for all steps."""
        self.server_args = getattr(model_runner, "server_args", None)
        self.context_len = getattr(model_runner.model_config, "context_len", 0)
        self.forward_metadata: Metadata | None = None
        self.buffers: Buffers | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that replays no CUDA graph of the whole model.

        Raises:
            NotImplementedError: the step neither decodes nor extends.
        """
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_extend_or_draft_extend_or_mixed()):
            raise NotImplementedError(f"a step must decode or extend, got {mode.name}")
        lengths = forward_batch.seq_lens.to(torch.int32)
        requests = lengths.shape[0]
        if mode.is_decode_or_idle():
            tokens, most, starts = requests, 1, self.row_starts[: requests + 1]
        else:
            counts = forward_batch.extend_seq_lens_cpu
            tokens = forward_batch.extend_num_tokens
            most = tokens if counts is None else max(counts, default=1)
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=lengths.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
        slots = self.first_slots.index_select(0, forward_batch.req_pool_indices)
        window_table = window_slots = None
        if self.has_window_pool:
            window_table = self._window_pages(slots)
            window_slots = self._window_slots(forward_batch.out_cache_loc)
        table = slots if self.page_size == 1 else slots.floor_divide_(self.page_size)
        self._use(lengths, table, window_table, window_slots, starts, tokens, most)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of CUDA graphs for at most ``max_bs`` requests."""
        pages, device = self.first_slots.shape[1], self.first_slots.device
        table = torch.zeros(max_bs, pages, dtype=torch.int32, device=device)
        self.buffers = Buffers(
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=device),
            block_table=table,
            window_table=torch.zeros_like(table) if self.has_window_pool else None,
            window_slots=(
                torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
                if self.has_window_pool
                else None
            ),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a decoding step that captures or replays a CUDA graph, in the graph's buffers.

        Raises:
            NotImplementedError: the step does not decode.
        """
        mode, buffers = forward_batch.forward_mode, self.buffers
        if not mode.is_decode_or_idle() or buffers is None:
            raise NotImplementedError(
                f"a captured step must decode, got {mode.name}: "
                "set --cuda-graph-backend-prefill to breakable or disabled"
            )
        requests = forward_batch.batch_size
        lengths, table = buffers.seq_lens[:requests], buffers.block_table[:requests]
        lengths.copy_(forward_batch.seq_lens[:requests])
        torch.index_select(self.first_slots, 0, forward_batch.req_pool_indices[:requests], out=table)
        window_table = window_slots = None
        if buffers.window_table is not None and buffers.window_slots is not None:
            window_table = buffers.window_table[:requests]
            window_table.copy_(self._window_pages(table))
            given = forward_batch.out_cache_loc
            window_slots = buffers.window_slots[: given.shape[0]]
            window_slots.copy_(self._window_slots(given))
        if self.page_size > 1:
            table.floor_divide_(self.page_size)
        starts = self.row_starts[: requests + 1]
        self._use(lengths, table, window_table, window_slots, starts, requests, 1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the number of keys of padded requests."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the attention of q (tokens, heads * head_dim), after k and v are written to the pool.

        Raises:
            NotImplementedError: the layer or an argument is not served.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{name} must be None, got {value!r}")
        metadata = self.forward_metadata
        assert metadata is not None
        if save_kv_cache and k is not None and v is not None:
            slots = KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        number = layer.layer_id
        known = self.layers.get(number)
        if known is None:
            known = self.layers[number] = self._options(layer)
            self._warm_up(known, number, q, sinks)
        step = metadata.window_step if known.has_window_pool else metadata.step
        assert step is not None
        out = output_of(forward_batch)
        if out is None:
            out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        pool = self.token_to_kv_pool
        known.attention.attend(
            q,
            (pool.get_key_buffer(number), pool.get_value_buffer(number)),
            out,
            step,
            known.causal,
            None,
            sinks,
            known.k_scale,
            known.v_scale,
        )
        return out

    forward_decode = forward_extend

    def _warm_up(self, known: LayerOptions, number: int, q: Tensor, sinks: Tensor | None) -> None:
        """Compile the kernels of all steps of a layer, unless those of such a layer are compiled already.

        SGLang runs all layers before it accepts requests, and only then passes sinks. Nothing is loaded while
        a CUDA graph is captured.
        """
        if is_capturing(q.device):
            return
        attention = known.attention
        kind = attention.options, attention.sizes, known.causal, known.has_window_pool, sinks is None
        if kind not in self.compiled_kinds:
            self.compiled_kinds.add(kind)
            warm_up(partial(self._calls, known, number, q, sinks), q.device, logger)

    def _calls(self, known: LayerOptions, number: int, q: Tensor, sinks: Tensor | None) -> list[Call]:
        """Return the calls of a layer in all steps, as far as these need other kernels."""
        buffers = self.token_to_kv_pool.get_key_buffer(number), self.token_to_kv_pool.get_value_buffer(number)
        heads, _, head_dim_v, _ = known.attention.sizes

        def run(batch: int, tokens: int, longest: int) -> None:
            new = partial(torch.empty, dtype=q.dtype, device=q.device)
            numbers = partial(torch.zeros, dtype=torch.int32, device=q.device)
            cache = tuple(
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in buffers
            )
            table = numbers(batch, self.first_slots.shape[1])
            queries = rounded_queries(longest, self.min_queries)
            step = Step(
                num_actual_tokens=tokens,
                max_query_len=queries,
                query_start_loc=numbers(batch + 1),
                seq_lens=numbers(batch),
                block_table=table,
                is_one_query_each=queries == 1,
            )
            known.attention.attend(
                new(tokens, q.shape[1]), cache, new(tokens, heads * head_dim_v), step, known.causal, None,
                sinks, known.k_scale, known.v_scale,
            )  # fmt: skip

        ones, chunks = calls_in(partial(run, 2, 2, 1)), calls_in(partial(run, 2, 4, 2))
        return step_calls(ones, chunks, self._limits())

    def _limits(self) -> StepLimits:
        """Return the limits of a step, by SGLang's arguments."""
        given: Any = self.server_args
        requests = self.first_slots.shape[0]
        tokens = given.chunked_prefill_size or 0
        if tokens <= 0:  # prompts are not cut
            tokens = max(given.max_prefill_tokens, self.context_len)
        if given.enable_mixed_chunk:
            tokens += requests
        return StepLimits(requests, tokens, min_queries=self.min_queries)

    def _use(
        self,
        lengths: Tensor,
        table: Tensor,
        window_table: Tensor | None,
        window_slots: Tensor | None,
        starts: Tensor,
        tokens: int,
        most: int,
    ) -> None:
        """Make ``forward_metadata``, whose second step differs from the first in the pages."""
        queries = rounded_queries(most, self.min_queries)
        step = Step(
            num_actual_tokens=tokens,
            max_query_len=queries,
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=table,
            is_one_query_each=queries == 1,
        )
        window_step = None
        if window_table is not None:
            window_step = copy.copy(step)
            window_step.block_table = window_table
        self.forward_metadata = Metadata(step, window_step, window_slots)

    def _window_slots(self, slots: Tensor) -> Tensor:
        """Return the slots in the window's pool; -1 for those that have left the window."""
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)

    def _window_pages(self, first_slots: Tensor) -> Tensor:
        """Return the pages in the window's pool. Pages that have left the window become 0."""
        return (self._window_slots(first_slots) // self.page_size).clamp_(min=0).to(torch.int32)

    def _options(self, layer: Any) -> LayerOptions:
        """Return a layer's options and scales, or raise a NotImplementedError if it is not served."""
        for name, expected in (
            ("is_cross_attention", False), ("use_irope", False), ("pos_encoding_mode", "NONE"),
            ("logit_capping_method", "tanh"), ("xai_temperature_len", -1),
        ):  # fmt: skip
            if getattr(layer, name) != expected:
                raise NotImplementedError(
                    f"layer {layer.layer_id}: {name} must be {expected!r}, got {getattr(layer, name)!r}"
                )
        if not 1 <= layer.qk_head_dim <= MAX_HEAD_DIM:
            raise NotImplementedError(f"head_dim must be at most {MAX_HEAD_DIM}, got {layer.qk_head_dim}")
        k_scale = v_scale = None
        if self.kv_cache_dtype == FP8:
            device = self.first_slots.device
            scales = torch.ones(2, layer.tp_k_head_num, dtype=torch.float32, device=device)
            for scale, given in zip(scales, (layer.k_scale, layer.v_scale), strict=True):
                if given is not None:
                    scale.copy_(given)  # the layer has one scale for all heads
            k_scale, v_scale = scales.unbind()
        attention = PoolAttention(
            scale=float(layer.scaling),
            softcap=float(layer.logit_cap or 0.0),
            window=int(layer.sliding_window_size),  # the query is not counted
            invariant=self.invariant,
            sizes=(layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim, self.page_size),
        )
        return LayerOptions(
            attention=attention,
            causal=layer.attn_type not in NOT_CAUSAL,
            has_window_pool=(
                self.has_window_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
            ),
            k_scale=k_scale,
            v_scale=v_scale,
        )


def _refuse(runner: Any) -> None:
    """Raise a NotImplementedError with the reason if the backend does not serve the model or the server."""
    config, parallel = runner.model_config, get_parallel()
    if config.attention_arch != AttentionArch.MHA:
        raise NotImplementedError(f"attention_arch must be MHA, got {config.attention_arch.name}")
    for name in ("is_encoder_decoder", "is_local_attention_model"):
        if getattr(config, name):
            raise NotImplementedError(f"{name} must be False, got True")
    for name in ("attn_cp_size", "attn_dcp_size"):
        if getattr(parallel, name) > 1:
            raise NotImplementedError(f"{name} must be 1, got {getattr(parallel, name)}")
    algorithm = get_spec().speculative_algorithm
    if algorithm is not None:
        raise NotImplementedError(f"speculative_algorithm must be None, got {algorithm}")
    if runner.kv_index_translator.is_translating:
        raise NotImplementedError("enable_unified_memory must be False, got True")
    if runner.kv_cache_dtype not in (*DTYPES, FP8) or runner.kv_cache_dtype_str == "mxfp8":
        raise NotImplementedError(
            f"kv_cache_dtype must be the model's or fp8_e4m3, got {runner.kv_cache_dtype_str}"
        )
