"""vLLM's arguments that :class:`~flashtile.engine.LLM`, ``flashtile serve`` and SamplingParams lack.

Each is accepted with the values that change nothing here. Any other value is refused with what to do instead,
so that no argument is silently ignored whose effect a user may rely on. The names are those of vLLM 0.25.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

IN_VLLM = "vLLM has it, on flashtile's attention: see docs/guides/vllm.md"
T = TypeVar("T")


class Argument(NamedTuple):
    """An argument of vLLM that has no effect here, or none with some of its values.

    Attributes:
        neutral: the values that are accepted, or None: every value is.
        words: what happens here instead, and what to use. It completes "NAME is not supported: ".
        flag: whether its option on the command line takes no value.
    """

    neutral: tuple[Any, ...] | None
    words: str
    flag: bool = False


def _flag(words: str, *neutral: bool) -> Argument:
    return Argument(neutral or None, words, True)


_LORA = f"merge the adapter into its model; {IN_VLLM}"
_IMAGES = f"the engine serves text only; {IN_VLLM}"
_FILES = "nothing is downloaded; `hf download` has this option, then give the folder as model"
_LOGS = "the engine logs no statistics; get_metrics() and the server's /metrics have them"
_CONFIG = "write the values into a copy of the model's config.json"

LLM_ARGUMENTS: dict[str, Argument] = {
    "additional_config": Argument((None, {}), IN_VLLM),
    "allowed_local_media_path": Argument((None, ""), _IMAGES),
    "attention_backend": Argument((None, "CUSTOM"), "the engine's attention is flashtile's"),
    "attention_config": Argument((None, {}), "the engine's attention is flashtile's"),
    "calculate_kv_scales": _flag("an fp8 cache has no scales", False),
    "code_revision": Argument((None,), "no code of models is run"),
    "compilation_config": Argument(
        (None, {}, 0), "nothing is compiled by torch; enforce_eager=True stops CUDA graphs"
    ),
    "config_format": Argument(("auto", "hf"), "models are read in Hugging Face's format only"),
    "cpu_offload_gb": Argument((0, None), f"use quantization='fp8', or more GPUs; {IN_VLLM}"),
    "disable_async_output_proc": _flag("use async_scheduling=False", False),
    "disable_cascade_attn": _flag("use cascade_attention=True", True),
    "disable_chunked_mm_input": _flag(_IMAGES, False),
    "disable_custom_all_reduce": _flag("the engine picks its all-reduce by its size", False),
    "disable_hybrid_kv_cache_manager": _flag("all layers share one block table"),
    "disable_log_stats": _flag(_LOGS),
    "disable_nccl_for_dp_synchronization": _flag("replicas do not synchronise"),
    "disable_sliding_window": _flag("set max_model_len to at most the model's window", False),
    "distributed_executor_backend": Argument(
        (None, "mp", "uni", "external_launcher"), "processes are started by torchrun"
    ),
    "download_dir": Argument((None,), _FILES),
    "enable_chunked_prefill": _flag(
        "max_num_batched_tokens bounds the chunks of prompts; raise it to the longest prompt",
        True,
    ),
    "enable_dbo": _flag(IN_VLLM, False),
    "enable_eplb": _flag(IN_VLLM, False),
    "enable_expert_parallel": _flag("experts are divided among GPUs by tensor_parallel_size", False),
    "enable_lora": _flag(_LORA, False),
    "enable_prompt_embeds": _flag("prompts are texts or tokens", False),
    "enable_sleep_mode": _flag("sleep and wake_up need no option"),
    "enable_tower_connector_lora": _flag(_LORA, False),
    "fully_sharded_loras": _flag(_LORA, False),
    "hf_config_path": Argument((None,), "config.json is read from the model's folder"),
    "hf_overrides": Argument((None, {}), _CONFIG),
    "hf_token": Argument((None, False), _FILES),
    "ignore_patterns": Argument(None, "only *.safetensors are read"),
    "interleave_mm_strings": _flag(_IMAGES, False),
    "io_processor_plugin": Argument((None,), IN_VLLM),
    "kv_cache_metrics": _flag(_LOGS, False),
    "kv_events_config": Argument((None,), IN_VLLM),
    "kv_offloading_size": Argument((None, 0), "use swap_space for preempted sequences"),
    "kv_sharing_fast_prefill": _flag(IN_VLLM, False),
    "kv_transfer_config": Argument((None,), IN_VLLM),
    "language_model_only": _flag("the engine serves text only"),
    "limit_mm_per_prompt": Argument((None, {}), _IMAGES),
    "logits_processor_pattern": Argument((None,), "give functions as logits_processors of SamplingParams"),
    "logits_processors": Argument((None, []), "give functions as logits_processors of SamplingParams"),
    "long_prefill_token_threshold": Argument(
        (None, 0), "max_num_batched_tokens bounds the chunks of prompts"
    ),
    "lora_dtype": Argument((None, "auto"), _LORA),
    "mamba_cache_dtype": Argument((None, "auto"), "no model of the engine has a state-space layer"),
    "max_cpu_loras": Argument((None,), _LORA),
    "max_long_partial_prefills": Argument((None, 1), "max_num_batched_tokens bounds the chunks of prompts"),
    "max_lora_rank": Argument((None, 16), _LORA),
    "max_loras": Argument((None, 1), _LORA),
    "max_num_partial_prefills": Argument((None, 1), "max_num_batched_tokens bounds the chunks of prompts"),
    "max_parallel_loading_workers": Argument(None, "weights are read by one thread for each GPU"),
    "max_seq_len_to_capture": Argument(None, "CUDA graphs hold for every length"),
    "mm_processor_cache_gb": Argument(None, "the engine serves text only"),
    "mm_processor_kwargs": Argument((None, {}), _IMAGES),
    "model_impl": Argument(
        (None, "auto"),
        f"the engine has its own models; Transformers takes attn_implementation='flashtile'; {IN_VLLM}",
    ),
    "model_loader_extra_config": Argument((None, {}), "weights are read from *.safetensors only"),
    "nnodes": Argument((None, 1), f"the engine runs on one machine; {IN_VLLM}"),
    "num_lookahead_slots": Argument((None, 0), "num_speculative_tokens of speculative_config sets them"),
    "optimization_level": Argument(None, "nothing is compiled by torch"),
    "override_generation_config": Argument(
        (None, {}), "give SamplingParams, or another folder as generation_config"
    ),
    "override_neuron_config": Argument((None, {}), IN_VLLM),
    "override_pooler_config": Argument((None, {}), f"the engine generates text only; {IN_VLLM}"),
    "pipeline_parallel_size": Argument((None, 1), "use tensor_parallel_size"),
    "pooler_config": Argument((None, {}), f"the engine generates text only; {IN_VLLM}"),
    "prefix_caching_hash_algo": Argument(
        (None, "sha256", "builtin"), "prefixes are compared by their tokens"
    ),
    "preemption_mode": Argument((None,), "swap_space chooses: 0 recomputes preempted sequences"),
    "profiler_config": Argument((None, {}), "use torch.profiler around the calls"),
    "quantization_config": Argument((None, {}), "use quantization='fp8'"),
    "ray_workers_use_nsight": _flag("the engine does not use Ray", False),
    "revision": Argument((None,), _FILES),
    "rope_scaling": Argument((None, {}), _CONFIG),
    "rope_theta": Argument((None,), _CONFIG),
    "runner": Argument((None, "auto", "generate"), f"the engine generates text only; {IN_VLLM}"),
    "scheduler_cls": Argument((None,), IN_VLLM),
    "scheduling_policy": Argument(
        (None, "fcfs", "priority"), "requests of equal priority run in their order"
    ),
    "safetensors_load_strategy": Argument(None, "files are mapped into memory"),
    "skip_mm_profiling": _flag("the engine serves text only"),
    "structured_outputs_config": Argument(
        (None, {}), "llguidance computes structures; give one as structured_outputs of SamplingParams"
    ),
    "task": Argument((None, "auto", "generate"), f"the engine generates text only; {IN_VLLM}"),
    "tokenizer_mode": Argument(("auto", "hf"), "tokenizers are read from tokenizer.json"),
    "tokenizer_pool_size": Argument(
        (None, 0), "texts are encoded by the tokenizers package, which uses threads"
    ),
    "tokenizer_revision": Argument((None,), _FILES),
    "trust_remote_code": _flag(
        "no code of models is run; leave it out for the models of docs/guides/engine.md, and load others in "
        "Transformers with attn_implementation='flashtile'",
        False,
    ),
    "use_tqdm_on_load": _flag("no progress of loading is shown", False, True),
    "use_v2_block_manager": _flag("the engine has one block manager"),
    "worker_cls": Argument((None, "auto"), IN_VLLM),
    "worker_extension_cls": Argument((None, ""), IN_VLLM),
}
"""Arguments of vLLM's ``LLM`` and ``EngineArgs``."""

SERVE_ARGUMENTS: dict[str, Argument] = {
    **LLM_ARGUMENTS,
    "allow_credentials": _flag("calls of web pages send their key in a header", False),
    "allowed_headers": Argument((["*"], "*"), "all headers that calls need are allowed"),
    "allowed_methods": Argument((["*"], "*"), "all methods that calls need are allowed"),
    "allowed_origins": Argument((), "use --cors-origin"),
    "api_server_count": Argument((1,), "use --data-parallel-size"),
    "chat_template": Argument((), "write the template to chat_template.jinja in the folder of --tokenizer"),
    "chat_template_content_format": Argument(
        ("auto",), "the content is given to the template as the call has it"
    ),
    **{
        name: Argument((neutral,), "replicas are processes of one machine")
        for name, neutral in {
            "data_parallel_address": "127.0.0.1",
            "data_parallel_backend": "mp",
            "data_parallel_rank": 0,
            "data_parallel_rpc_port": 0,
            "data_parallel_size_local": None,
            "data_parallel_start_rank": 0,
            "node_rank": 0,
        }.items()
    },
    "data_parallel_external_lb": _flag("replicas are processes of one machine", False),
    "data_parallel_hybrid_lb": _flag("replicas are processes of one machine", False),
    "decode_context_parallel_size": Argument((1,), "use --tensor-parallel-size"),
    "default_chat_template_kwargs": Argument(({},), "calls give chat_template_kwargs"),
    "disable_fastapi_docs": _flag("/docs and /openapi.json are always served", False),
    "disable_frontend_multiprocessing": _flag("the server and its engine share a process"),
    "disable_log_requests": _flag("no request's content is logged"),
    "disable_uvicorn_access_log": _flag("use --no-access-log", False),
    "enable_auto_tool_choice": _flag("tool calls are found by --tool-call-parser auto", True),
    "enable_force_include_usage": _flag("clients set stream_options", False),
    "enable_log_requests": _flag("no request's content is logged", False),
    "enable_log_outputs": _flag("no answer's content is logged", False),
    "enable_prompt_tokens_details": _flag("usage has no cached tokens; /metrics counts them", False),
    "enable_request_id_headers": _flag("answers have their request's id in the body", False),
    "enable_server_load_tracking": _flag("/load counts calls in any case"),
    "enable_ssl_refresh": _flag("restart the server with the new certificate", False),
    "enable_tokenizer_info_endpoint": _flag("/tokenize and /detokenize use the tokenizer", False),
    "exclude_tools_when_tool_choice_none": _flag("leave tools out of the call", False),
    "headless": _flag(IN_VLLM, False),
    "log_config_file": Argument((), "the log goes to stderr"),
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
}
"""Options of ``vllm serve``."""

_STRUCTURED = "use structured_outputs={{{!r}: ...}}"
_BEAMS = "use LLM.beam_search with BeamSearchParams; calls of the server have use_beam_search"
SAMPLING_ARGUMENTS: dict[str, Argument] = {
    "best_of": Argument((None, 1), "use n, and choose among the answers by their cumulative_logprob"),
    "early_stopping": Argument((None, False), _BEAMS),
    "flat_logprobs": Argument((None, False), "log-probabilities are dicts, one for each position"),
    "guided_choice": Argument((None,), _STRUCTURED.format("choice")),
    "guided_decoding": Argument((None,), "use structured_outputs, a dict such as {'json': schema}"),
    "guided_decoding_backend": Argument((None, "auto", "guidance"), "llguidance computes structures"),
    "guided_grammar": Argument((None,), _STRUCTURED.format("grammar")),
    "guided_json": Argument((None,), _STRUCTURED.format("json")),
    "guided_regex": Argument((None,), _STRUCTURED.format("regex")),
    "guided_whitespace_pattern": Argument(
        (None,), 'write "x-guidance": {"whitespace_flexible": false} into the schema'
    ),
    "length_penalty": Argument((None, 1, 1.0), _BEAMS),
    "repetition_detection": Argument((None,), "use repetition_penalty"),
    "response_format": Argument((None,), _STRUCTURED.format("json")),
    "skip_clone": Argument(None, "parameters are copied where it is needed"),
    "skip_reading_prefix_cache": Argument(
        (None, False), "use enable_prefix_caching=False of LLM, or a cache_salt"
    ),
    "thinking_token_budget": Argument((None,), "max_tokens bounds reasoning and content together"),
    "truncate_prompt_tokens": Argument(
        (None, -1), "shorten the prompt's list of tokens; calls of the server have this field"
    ),
    "use_beam_search": Argument((None, False), _BEAMS),
}
"""Arguments of vLLM's ``SamplingParams``, also of earlier versions."""


def check_argument(table: Mapping[str, Argument], name: str, value: Any) -> None:
    """Raise NotImplementedError, with what to do instead, unless the value of an argument changes nothing."""
    neutral, words, _ = table[name]
    if neutral is None or any(type(value) is type(one) and value == one for one in neutral):
        return
    allowed = f"must be {' or '.join(map(repr, neutral))}" if neutral else "is not supported"
    raise NotImplementedError(f"{name} {allowed}, got {value!r:.60}: {words}")


def takes_also(table: Mapping[str, Argument]) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class whose constructor then also takes the arguments of ``table``.

    The signature stays as it is. A name that neither has raises TypeError with the names that are like it.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **given: Any) -> None:
            for name in [name for name in given if name not in known]:
                if name not in table:
                    like = difflib.get_close_matches(name, [*known, *table], 1)
                    hint = f"; did you mean {like[0]}?" if like else ""
                    raise TypeError(f"{cls.__name__} has no argument {name}{hint}")
                check_argument(table, name, given.pop(name))
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate
