"""vLLM's arguments that :class:`~flashtile.engine.LLM`, ``flashtile serve`` and SamplingParams lack.

Each is accepted with the values that change nothing here. Any other value is refused with what to do instead,
so that no argument is silently ignored whose effect a user may rely on. The names are those of vLLM 0.25 to
0.33, and some of earlier releases.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

IN_VLLM = "vLLM has it, on flashtile's attention: see docs/guides/vllm.md"
T = TypeVar("T", bound=Callable[..., Any])


class Argument(NamedTuple):
    """An argument of vLLM that has no effect here, or none with some of its values.

    Attributes:
        neutral: the values that are accepted in addition to None, or None: every value is.
        words: what happens here instead, and what to use. It completes "NAME is not supported: ".
        flag: whether its option on the command line takes no value.
    """

    neutral: tuple[Any, ...] | None
    words: str
    flag: bool = False


def _flag(words: str, *neutral: bool) -> Argument:
    return Argument(neutral or None, words, True)


def _each(words: str, **neutral: Any) -> dict[str, Argument]:
    """Return arguments that share a reason, each with the value that is accepted. A bool makes it a flag."""
    return {
        name: Argument(() if value is None else (value,), words, isinstance(value, bool))
        for name, value in neutral.items()
    }


def _ignored(words: str, names: str, flags: str = "") -> dict[str, Argument]:
    """Return arguments that are accepted with every value, by names with spaces in between."""
    return {name: Argument(None, words) for name in names.split()} | {
        name: _flag(words) for name in flags.split()
    }


_LORA = f"merge the adapter into its model; {IN_VLLM}"
_IMAGES = f"the engine serves text only; {IN_VLLM}"
_FILES = "nothing is downloaded; `hf download` has this option, then give the folder as model"
_LOGS = "the engine logs no statistics; get_metrics() and the server's /metrics have them"
_CONFIG = "write the values into a copy of the model's config.json"
_REPLICAS = "replicas are processes of one machine: flashtile serve has --data-parallel-size"
_TEXT = "the engine serves text only"
_STATE_SPACE = "no model of the engine has a state-space or linear-attention layer"
_SCHEDULING = "max_num_seqs and max_num_batched_tokens bound a step"
_KERNELS = "the engine has flashtile's kernels"

_BOTH: dict[str, Argument] = {
    "additional_config": Argument(({},), IN_VLLM),
    "allowed_local_media_path": Argument(("",), _IMAGES),
    "attention_backend": Argument(("CUSTOM",), "the engine's attention is flashtile's"),
    "attention_config": Argument(({},), "the engine's attention is flashtile's"),
    "calculate_kv_scales": _flag("an fp8 cache has no scales", False),
    "code_revision": Argument((), "no code of models is run"),
    "compilation_config": Argument(
        ({}, 0), "nothing is compiled by torch; enforce_eager=True stops CUDA graphs"
    ),
    "config_format": Argument(("auto", "hf"), "models are read in Hugging Face's format only"),
    "cpu_offload_gb": Argument((0,), f"use quantization='fp8', or more GPUs; {IN_VLLM}"),
    "disable_async_output_proc": _flag("use async_scheduling=False", False),
    "disable_cascade_attn": _flag("cascade_attention=False turns groups off"),
    "disable_chunked_mm_input": _flag(_IMAGES, False),
    "disable_custom_all_reduce": _flag("the engine picks its all-reduce by its size", False),
    "disable_hybrid_kv_cache_manager": _flag("all layers share one block table"),
    "disable_log_stats": _flag(_LOGS),
    "disable_sliding_window": _flag("set max_model_len to at most the model's window", False),
    "distributed_executor_backend": Argument(
        ("mp", "uni", "external_launcher"), "processes are started by torchrun"
    ),
    "download_dir": Argument((), _FILES),
    "enable_chunked_prefill": _flag(
        "max_num_batched_tokens bounds the chunks of prompts; raise it to the longest prompt",
        True,
    ),
    "enable_dbo": _flag(IN_VLLM, False),
    "enable_expert_parallel": _flag("experts are divided among GPUs by tensor_parallel_size", False),
    "enable_lora": _flag(_LORA, False),
    "enable_prompt_embeds": _flag("prompts are texts or tokens", False),
    "enable_sleep_mode": _flag("LLM has sleep and wake_up, and the server with --server-dev-mode"),
    "enable_tower_connector_lora": _flag(_LORA, False),
    "fully_sharded_loras": _flag(_LORA, False),
    "hf_config_path": Argument((), "config.json is read from the model's folder"),
    "hf_overrides": Argument(({},), _CONFIG),
    "hf_token": Argument((False,), _FILES),
    "ignore_patterns": Argument(None, "only *.safetensors are read"),
    "interleave_mm_strings": _flag(_IMAGES, False),
    "io_processor_plugin": Argument((), IN_VLLM),
    "kv_events_config": Argument((), IN_VLLM),
    "kv_offloading_size": Argument((0,), "use swap_space for preempted sequences"),
    "kv_sharing_fast_prefill": _flag(IN_VLLM, False),
    "kv_transfer_config": Argument((), IN_VLLM),
    "limit_mm_per_prompt": Argument(({},), _IMAGES),
    "logits_processor_pattern": Argument((), "give functions as logits_processors of SamplingParams"),
    "logits_processors": Argument(([],), "give functions as logits_processors of SamplingParams"),
    "long_prefill_token_threshold": Argument(
        (0,), "max_num_batched_tokens bounds the chunks of prompts"
    ),
    "lora_dtype": Argument(("auto",), _LORA),
    "max_cpu_loras": Argument((), _LORA),
    "max_long_partial_prefills": Argument((1,), "max_num_batched_tokens bounds the chunks of prompts"),
    "max_lora_rank": Argument((16,), _LORA),
    "max_loras": Argument((1,), _LORA),
    "max_num_partial_prefills": Argument((1,), "max_num_batched_tokens bounds the chunks of prompts"),
    "max_parallel_loading_workers": Argument(None, "weights are read by one thread for each GPU"),
    "max_seq_len_to_capture": Argument(None, "CUDA graphs hold for every length"),
    "mm_processor_kwargs": Argument(({},), _IMAGES),
    "model_impl": Argument(
        ("auto",),
        f"the engine has its own models; Transformers takes attn_implementation='flashtile'; {IN_VLLM}",
    ),
    "model_loader_extra_config": Argument(({},), "weights are read from *.safetensors only"),
    "num_lookahead_slots": Argument((0,), "num_speculative_tokens of speculative_config sets them"),
    "optimization_level": Argument(None, "nothing is compiled by torch"),
    "override_generation_config": Argument(
        ({},), "give SamplingParams, or another folder as generation_config"
    ),
    "override_neuron_config": Argument(({},), IN_VLLM),
    "override_pooler_config": Argument(({},), f"the engine generates text only; {IN_VLLM}"),
    "pipeline_parallel_size": Argument((1,), "use tensor_parallel_size"),
    "pooler_config": Argument(({},), f"the engine generates text only; {IN_VLLM}"),
    "prefix_caching_hash_algo": Argument(None, "prefixes are compared by their tokens"),
    "preemption_mode": Argument((), "swap_space chooses: 0 recomputes preempted sequences"),
    "profiler_config": Argument(({},), "use torch.profiler around the calls"),
    "quantization_config": Argument(({},), "use quantization='fp8'"),
    "ray_workers_use_nsight": _flag("the engine does not use Ray", False),
    "revision": Argument((), _FILES),
    "rope_scaling": Argument(({},), _CONFIG),
    "rope_theta": Argument((), _CONFIG),
    "runner": Argument(("auto", "generate"), f"the engine generates text only; {IN_VLLM}"),
    "scheduler_cls": Argument((), IN_VLLM),
    "scheduling_policy": Argument(
        ("fcfs", "priority"), "requests of equal priority run in their order"
    ),
    "safetensors_load_strategy": Argument(None, "files are mapped into memory"),
    "structured_outputs_config": Argument(
        ({},), "llguidance computes structures; give one as structured_outputs of SamplingParams"
    ),
    "task": Argument(("auto", "generate"), f"the engine generates text only; {IN_VLLM}"),
    "tokenizer_mode": Argument(("auto", "hf"), "tokenizers are read from tokenizer.json"),
    "tokenizer_pool_size": Argument(
        (0,), "texts are encoded by the tokenizers package, which uses threads"
    ),
    "tokenizer_revision": Argument((), _FILES),
    "trust_remote_code": _flag(
        "no code of models is run; leave it out for the models of docs/guides/engine.md, and load others in "
        "Transformers with attn_implementation='flashtile'",
        False,
    ),
    "use_tqdm_on_load": _flag("no progress of loading is shown", False, True),
    "use_v2_block_manager": _flag("the engine has one block manager"),
    "worker_cls": Argument(("auto",), IN_VLLM),
    "worker_extension_cls": Argument(("",), IN_VLLM),
    **_each(
        _REPLICAS, data_parallel_address="127.0.0.1", data_parallel_backend="mp", data_parallel_rank=0,
        data_parallel_rpc_port=0, data_parallel_size_local=None, data_parallel_start_rank=0,
        data_parallel_external_lb=False, data_parallel_hybrid_lb=False,
        data_parallel_multi_port_external_lb=False,
    ),
    **_ignored(
        "replicas do not synchronise", "dp_sync_interval elastic_ep_max_dp_size",
        "disable_nccl_for_dp_synchronization",
    ),
    **_each(f"the engine runs on one machine; {IN_VLLM}", nnodes=1, node_rank=0),
    **_ignored("the engine runs on one machine", "master_addr master_port"),
    **_each("use tensor_parallel_size", decode_context_parallel_size=1, prefill_context_parallel_size=1),
    **_ignored(
        "no sequence is divided among GPUs",
        "cp_kv_cache_interleave_size dcp_comm_backend dcp_kv_cache_interleave_size", "dcp_q_replicate",
    ),
    **_ignored(
        "experts are divided among GPUs by tensor_parallel_size",
        "all2all_backend eplb_config expert_placement_strategy", "enable_ep_weight_filter",
    ),
    **_each(
        IN_VLLM, enable_eplb=False, enable_elastic_ep=False, enable_hc_sp=False, enable_fault_tolerance=False,
        enable_batch_sharded_sampling=False, fault_tolerance_config={}, ec_manager_config={},
        ec_transfer_config=None, aux_output_config={}, watchdog_config={},
        diffusion_config=None, engram_config=None, enable_return_routed_experts=False,
        return_sampling_mask=False, enable_trace_replay=False, reasoning_config={}, convert="auto",
        tokens_only=False, model_class_overrides={}, model_weights="", monokernel=False, ubatch_size=0,
        watermark_config=None,
    ),
    **_ignored(
        "steps are not divided", "dbo_decode_token_threshold dbo_prefill_token_threshold"
    ),
    **_each("torch.distributed's timeouts hold", distributed_timeout_seconds=None,
            cpu_distributed_timeout_seconds=None),
    **_each("dtype holds for attention as well", override_attention_dtype=None),
    **_each("set CUDA_VISIBLE_DEVICES", device_ids=None),
    **_each("use numactl", numa_bind=False, numa_bind_nodes=None, numa_bind_cpus=None),
    **_each("use speculative_config", spec_method=None, spec_model=None, spec_tokens=None),
    **_each(_KERNELS, linear_backend="auto", moe_backend="auto", kernel_config={}, ir_op_priority={}),
    **_ignored(_KERNELS, "sparse_indexer_topk_backend", "enable_flashinfer_autotune"),
    **_ignored(
        "the engine chooses the batch sizes of its CUDA graphs",
        "cudagraph_capture_sizes max_cudagraph_capture_size",
    ),
    **_each(
        _SCHEDULING, max_num_active_seqs=None, max_num_scheduled_tokens=None,
        long_prefill_token_threshold_adaptive=False, prefill_schedule_interval=1,
        performance_mode="balanced",
    ),
    **_ignored(
        "a request is scheduled if the blocks of its next step are free", "watermark",
        "scheduler_reserve_full_isl",
    ),
    **_each(
        "flashtile serve has --max-concurrent-requests", max_num_queued_reqs=None, max_num_queued_tokens=None
    ),
    **_each("streams send each token at once", stream_interval=1),
    **_each("kv_cache_dtype holds for all layers", kv_cache_dtype_skip_layers=[]),
    **_each(
        "blocks of prefixes stay until their memory is needed", prefix_cache_retention_interval=0,
        prefix_match_unit=None,
    ),
    **_ignored("kv_offloading_size is not supported", "kv_offloading_backend"),
    **_each(f"use quantization='fp8', or more GPUs; {IN_VLLM}", offload_group_size=0),
    **_ignored(
        "weights stay on the GPU",
        "cpu_offload_params offload_backend offload_num_in_group offload_params offload_prefetch_step",
    ),
    **_each("LLM.update_weights takes all weights", weight_transfer_config=None),
    **_each("level 1 of LLM.sleep keeps all weights, level 2 none", sleep_preserve_parameter_names=[]),
    **_ignored(
        "sleep frees memory in one way, and CUDA graphs are captured again", "sleep_mode_backend",
        "sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend",
    ),
    **_ignored(
        "files are mapped into memory",
        "pt_load_map_location safetensors_prefetch_block_size safetensors_prefetch_num_threads",
    ),
    **_ignored("processes send tensors through files of shared memory", "", "enable_shm_tensor_arena"),
    **_ignored("fp8 is the only quantization", "", "allow_deprecated_quantization"),
    **_ignored("texts are encoded by the tokenizers package, which uses threads", "renderer_num_workers"),
    **_ignored("the noise of draws is a hash of seed, position and token", "", "use_fp64_gumbel"),
    **_each(
        _LORA, default_mm_loras=None, lora_target_modules=None, max_lora_cls_labels=None,
        enable_mixed_moe_lora_format=False, enable_moe_shared_loras=False, specialize_active_lora=False,
    ),
    **_ignored(
        _TEXT,
        "allowed_media_domains media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path "
        "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb "
        "mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb mm_tensor_ipc "
        "video_pruning_method video_pruning_rate",
        "enable_mm_processor_stats language_model_only mm_device_do_normalize skip_mm_profiling",
    ),
    **_each(_IMAGES, enable_mm_embeds=False, mm_encoder_only=False),
    **_ignored(
        _STATE_SPACE,
        "gdn_prefill_backend kda_decode_backend kda_prefill_backend mamba_backend mamba_block_size "
        "mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype "
        "mamba_ssu_algorithm replayssm_buffer_len",
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint swa_bounded_replay "
        "use_replayssm",
    ),
    **_each(
        _LOGS, collect_detailed_traces=None, cudagraph_metrics=False, custom_histogram_buckets=None,
        enable_layerwise_nvtx_tracing=False, enable_logging_iteration_details=False,
        enable_mfu_metrics=False, kv_cache_metrics=False, otlp_traces_endpoint=None,
        per_request_spec_decode_metrics="none", show_hidden_metrics_for_version=None,
    ),
    **_ignored(_LOGS, "kv_cache_metrics_sample", "aggregate_engine_logging"),
    **_ignored(
        "kernels are compiled before the first step (warmup)", "jit_monitor_mode", "jit_monitor_verbose"
    ),
    **_ignored("only variables named in the guides are read", "", "fail_on_environ_validation"),
    **_each("the log is Python's logging", log_config_file=None, log_level=None, logging_config=None),
    **_each("no request's content is logged", enable_log_requests=False),
    **_each("parsers have no plug-ins: see --reasoning-parser", reasoning_parser_plugin=None),
}  # fmt: skip
"""Arguments of vLLM's ``EngineArgs`` that neither ``LLM`` nor ``flashtile serve`` has."""

LLM_ARGUMENTS: dict[str, Argument] = {
    **_BOTH,
    "chat_template": Argument((), "LLM.chat has chat_template"),
    "data_parallel_size": Argument((1,), "flashtile serve has --data-parallel-size"),
    "max_logprobs": Argument(None, "logprobs of SamplingParams is at most that of the vocabulary"),
    "reasoning_parser": Argument(("",), "flashtile serve has --reasoning-parser"),
    "served_model_name": Argument(None, "outputs do not name the model"),
    "shutdown_timeout": Argument(None, "flashtile serve has --shutdown-timeout"),
}
"""Arguments of vLLM's ``LLM`` and ``EngineArgs``."""

SERVE_ARGUMENTS: dict[str, Argument] = {
    **_BOTH,
    "allow_credentials": _flag("calls of web pages send their key in a header", False),
    "allowed_headers": Argument((["*"], "*"), "all headers that calls need are allowed"),
    "allowed_methods": Argument((["*"], "*"), "all methods that calls need are allowed"),
    "allowed_origins": Argument((), "use --cors-origin"),
    "api_server_count": Argument((1,), "use --data-parallel-size"),
    "chat_template": Argument((), "write the template to chat_template.jinja in the folder of --tokenizer"),
    "chat_template_content_format": Argument(
        ("auto",), "the content is given to the template as the call has it"
    ),
    "default_chat_template_kwargs": Argument(({},), "calls give chat_template_kwargs"),
    "disable_fastapi_docs": _flag("/docs and /openapi.json are always served", False),
    "disable_frontend_multiprocessing": _flag("the server and its engine share a process"),
    "disable_log_requests": _flag("no request's content is logged"),
    "disable_uvicorn_access_log": _flag("use --no-access-log", False),
    "enable_auto_tool_choice": _flag("tool calls are found by --tool-call-parser auto", True),
    "enable_force_include_usage": _flag("clients set stream_options", False),
    "enable_log_outputs": _flag("no answer's content is logged", False),
    "enable_prompt_tokens_details": _flag("usage has no cached tokens; /metrics counts them", False),
    "enable_request_id_headers": _flag("answers have their request's id in the body", False),
    "enable_server_load_tracking": _flag("/load counts calls in any case"),
    "enable_ssl_refresh": _flag("restart the server with the new certificate", False),
    "enable_tokenizer_info_endpoint": _flag("/tokenize and /detokenize use the tokenizer", False),
    "exclude_tools_when_tool_choice_none": _flag("leave tools out of the call", False),
    "headless": _flag(IN_VLLM, False),
    "lora_modules": Argument((), _LORA),
    "max_log_len": Argument(None, "no request's content is logged"),
    "middleware": Argument((), "put a proxy in front of the server"),
    "response_role": Argument(("assistant",), "answers have the role assistant"),
    "return_tokens_as_token_ids": _flag("clients set return_token_ids", False),
    "root_path": Argument(("",), "a proxy must remove the prefix from paths"),
    "ssl_cert_reqs": Argument((), "--ssl-ca-certs requires certificates of clients"),
    "ssl_ciphers": Argument((), "put a proxy with TLS in front of the server"),
    "tool_parser_plugin": Argument(("",), "see --tool-call-parser"),
    "tool_server": Argument((), "the client runs the tools"),
    "trust_request_chat_template": _flag("calls give no chat template", False),
    "uds": Argument((), "use --host and --port"),
    "uvicorn_log_level": Argument(("info",), "use --no-access-log for fewer lines"),
    **_each(
        "use --no-access-log", disable_access_log_for_endpoints=None
    ),
    **_each("the server speaks HTTP only", grpc=False, grpc_port=None),
    **_each("the template gets the effort of the call", reasoning_effort_map=None),
    **_each("calls that tool_choice requires match the tools' schemas", tool_strict_level=None),
    **_each("the server's /metrics has the times", enable_per_request_metrics=False),
    **_each("raise the proxy's time-out for idle connections", sse_keep_alive_interval=0),
    **_each(IN_VLLM, enable_scale_out=False),
    **_each("answers have no system_fingerprint", fingerprint_value=None),
    **_ignored("answers have no system_fingerprint", "fingerprint_mode"),
    **_ignored("no answer's content is logged", "", "enable_log_deltas"),
    **_ignored("errors of the server are logged with their stack", "", "log_error_stack"),
    **_ignored(_TEXT, "", "trust_request_mm_kwargs"),
    **_ignored(
        "the server has OpenAI's interface only", "anthropic_disabled_thinking_effort cohere_format",
        "cohere_is_reasoning_model enable_flash_late_interaction",
    ),
    **_ignored(
        "one process starts replicas again that end",
        "data_parallel_supervisor_port dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s",
    ),
    **_ignored("headers are bounded in any case", "h11_max_header_count h11_max_incomplete_event_size"),
    **_ignored("/docs loads nothing from elsewhere", "", "enable_offline_docs"),
}  # fmt: skip
"""Options of ``vllm serve``."""

_STRUCTURED = "use structured_outputs={{{!r}: ...}}"
_BEAMS = "use LLM.beam_search with BeamSearchParams; calls of the server have use_beam_search"
SAMPLING_ARGUMENTS: dict[str, Argument] = {
    "best_of": Argument((1,), "use n, and choose among the answers by their cumulative_logprob"),
    "early_stopping": Argument((False,), _BEAMS),
    "flat_logprobs": Argument((False,), "log-probabilities are dicts, one for each position"),
    "guided_choice": Argument((), _STRUCTURED.format("choice")),
    "guided_decoding": Argument((), "use structured_outputs, a dict such as {'json': schema}"),
    "guided_decoding_backend": Argument(("auto", "guidance"), "llguidance computes structures"),
    "guided_grammar": Argument((), _STRUCTURED.format("grammar")),
    "guided_json": Argument((), _STRUCTURED.format("json")),
    "guided_regex": Argument((), _STRUCTURED.format("regex")),
    "guided_whitespace_pattern": Argument(
        (), 'write "x-guidance": {"whitespace_flexible": false} into the schema'
    ),
    "length_penalty": Argument((1, 1.0), _BEAMS),
    "repetition_detection": Argument((), "use repetition_penalty"),
    "response_format": Argument((), _STRUCTURED.format("json")),
    "skip_clone": Argument(None, "parameters are copied where it is needed"),
    "skip_reading_prefix_cache": Argument(
        (False,), "use enable_prefix_caching=False of LLM, or a cache_salt"
    ),
    "thinking_token_budget": Argument((), "max_tokens bounds reasoning and content together"),
    "truncate_prompt_tokens": Argument(
        (-1,), "shorten the prompt's list of tokens; calls of the server have this field"
    ),
    "use_beam_search": Argument((False,), _BEAMS),
    **_each("answers have no watermark", watermarking=False),
    **_each(
        "use prompt_logprobs, for all positions", prompt_logprob_start=None, prompt_logprob_token_ids=None
    ),
    **_each("streams send each token at once", stream_interval=1),
    **_each(IN_VLLM, trace_decode_token_ids=None, routed_experts_prompt_start=0, output_text_buffer_length=0),
}  # fmt: skip
"""Arguments of vLLM's ``SamplingParams``, also of earlier versions."""

BEAM_ARGUMENTS: dict[str, Argument] = {
    **_each("answers have no watermark", watermarking=False),
    **_each("the text of an answer leaves special tokens out", skip_special_tokens=True),
    **_each("use SamplingParams", structured_outputs=None, allowed_token_ids=None),
}
"""Arguments of vLLM's ``BeamSearchParams``."""

STRUCTURE_ARGUMENTS: dict[str, Argument] = {
    **_each(
        'write "x-guidance": {"whitespace_flexible": false} into the schema', disable_any_whitespace=False,
        whitespace_pattern=None,
    ),
    **_each('write "additionalProperties": false into the schema', disable_additional_properties=False),
    **_each("use json, regex, choice or grammar", structural_tag=None),
}  # fmt: skip
"""Arguments of vLLM's ``StructuredOutputsParams``."""

CALL_ARGUMENTS: dict[str, Argument] = {
    **_each(_LORA, lora_request=None),
    **_each("texts are encoded as tokenizer.json says; prompts may be tokens", tokenization_kwargs={}),
    **_each(_IMAGES, mm_processor_kwargs={}),
    **_each("the content is given to the template as it is", chat_template_content_format="auto"),
    **_ignored("max_num_seqs bounds the batch", "concurrency_limit"),
    "use_tqdm": _flag("no progress is shown"),
}
"""Arguments of vLLM's methods of ``LLM``, those of all together."""

SLEEP_ARGUMENTS = _ignored(
    "the engine sleeps only without unfinished requests: await or abort them first", "mode"
)
"""Arguments of vLLM's ``LLM.sleep``."""

RESET_ARGUMENTS = _each("the engine shares no blocks with other engines", reset_connector=False)
"""Arguments of vLLM's ``LLM.reset_prefix_cache``."""

NO_METHODS = {
    **dict.fromkeys(("embed", "encode", "classify", "reward"), f"the engine generates text only; {IN_VLLM}"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model is llm.engine.runner.model"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch.profiler around the calls"),
    "release_kv_cache_memory": "use sleep",
    "llm_engine": "use engine",
}
"""Methods and attributes of vLLM's ``LLM`` that flashtile's lacks, each with what to do instead."""


def check_argument(table: Mapping[str, Argument], name: str, value: Any) -> None:
    """Raise NotImplementedError, with what to do instead, unless the value of an argument changes nothing."""
    neutral, words, _ = table[name]
    if value is None or neutral is None or any(type(value) is type(one) and value == one for one in neutral):
        return
    allowed = f"must be {' or '.join(map(repr, neutral))}" if neutral else "is not supported"
    raise NotImplementedError(f"{name} {allowed}, got {value!r:.60}: {words}")


def takes_also(table: Mapping[str, Argument], other: type | None = None) -> Callable[[T], T]:
    """Return a decorator of a function or a class, which then also takes the arguments of ``table``.

    The signature stays as it is. A name that neither has raises TypeError, which says that the class
    ``other`` has it, or which name is like it.
    """

    def decorate(target: T) -> T:
        made: Any = target
        function = made.__init__ if isinstance(target, type) else made
        known = list(inspect.signature(function).parameters)[1:]
        named = getattr(target, "__qualname__", "")

        @functools.wraps(function)
        def checked(self: Any, *args: Any, **given: Any) -> Any:
            for name in [name for name in given if name not in known]:
                if name not in table:
                    like = difflib.get_close_matches(name, [*known, *table], 1)
                    hint = f"; did you mean {like[0]}?" if like else ""
                    if other is not None and name in inspect.signature(other).parameters:
                        hint = f": it is an argument of {other.__name__}"
                    raise TypeError(f"{named} has no argument {name}{hint}")
                check_argument(table, name, given.pop(name))
            return function(self, *args, **given)

        if not isinstance(target, type):
            return cast(T, checked)
        made.__init__ = checked
        return target

    return decorate
