"""``LLM``: a model that answers prompts, with vLLM's argument and method names."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashtile.checks.arguments import as_int_within, is_choice
from flashtile.checks.conversions import as_float, as_int, check_flag
from flashtile.checks.vllm_arguments import (
    CALL_ARGUMENTS,
    LLM_ARGUMENTS,
    NO_METHODS,
    RESET_ARGUMENTS,
    SLEEP_ARGUMENTS,
    takes_also,
)
from flashtile.engine.config import IN_VLLM, ConfigError, ModelConfig, model_folder, read_config, read_json
from flashtile.engine.core import Engine, EngineStats, NamedTensors, Prompt, scores
from flashtile.engine.groups import PrefixGroups
from flashtile.engine.memory import bytes_of_block, bytes_of_tables, memory_left
from flashtile.engine.model import Model
from flashtile.engine.outputs import RequestOutput
from flashtile.engine.parallel import ALONE, ProcessRanks, Ranks, check_divides, local_device
from flashtile.engine.runner import LOGPROBS_MODES, Runner
from flashtile.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from flashtile.engine.scheduler import Scheduler
from flashtile.engine.speculation import DraftModel, comb, read_speculative_config
from flashtile.engine.step_calls import Limits, warm_up
from flashtile.engine.tokenizer import Tokenizer, load_tokenizer
from flashtile.engine.weights import open_weights, random_weights, with_checkpoint_head
from flashtile.hardware import machine
from flashtile.kv_cache import BlockManager

logger = logging.getLogger("flashtile.engine")

DTYPES = {name: getattr(torch, name) for name in ("float16", "half", "bfloat16", "float32", "float")}
MAX_DEFAULT_LENGTH = 2**20
"""Upper limit of the default ``max_model_len``, because longer rotary and block tables waste memory."""
CACHE_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


@takes_also(LLM_ARGUMENTS, SamplingParams)
class LLM:
    """A model and its engine.

    Args:
        model: a folder in Hugging Face's format: config.json, \\*.safetensors, tokenizer.json. Or the name of
            a model in Hugging Face's local cache, such as "Qwen/Qwen3-8B". Nothing is downloaded.
        tokenizer: another folder to read the tokenizer from.
        skip_tokenizer_init: load no tokenizer. Prompts must be lists of tokens, and answers have no text.
        dtype: "auto" (as stored; float32 on a CPU), "bfloat16", "float16" or "float32".
        load_format: "auto", "safetensors", or "dummy" for random weights, which need only config.json.
        device: "cuda", "cpu" ...; None is the first GPU, or the CPU if there is none.
        seed: seed of requests without a seed of their own.
        max_model_len: maximum number of tokens of prompt and answer together. None: the model's
            ``max_position_embeddings``, but at most 2^20 and at most the tokens that fit into the KV cache.
        max_num_seqs: maximum number of sequences computed at a time. None: 256, or ``max_num_batched_tokens``
            if that is smaller.
        max_num_batched_tokens: maximum number of tokens computed in a step. None: 8192 on a GPU, 1024 on a
            CPU.
        gpu_memory_utilization: share of the GPU's memory that the engine may use, above 0 and at most 1.
        kv_cache_memory_bytes: maximum bytes of the KV cache. None: on a GPU, the share
            ``gpu_memory_utilization`` of its memory, minus the weights and the temporary memory of the
            largest step; 1 GiB on a CPU.
        num_gpu_blocks_override: number of blocks of the KV cache. It overrides ``gpu_memory_utilization``
            and ``kv_cache_memory_bytes``.
        block_size: tokens per block of the KV cache. None: 16.
        kv_cache_dtype: "auto" (the dtype of the weights) or "fp8".
        enable_prefix_caching: reuse the blocks of equal prefixes. None: True.
        cascade_attention: read the blocks that sequences share, such as the prompt of ``n`` answers, once in
            a step instead of once for each sequence. Layers do so in steps in which it saves the reading of
            at least 128 MiB (:mod:`flashtile.engine.groups`). Sums are rounded in another order, as they are
            in batches of another size. True: also in steps with a long chunk of a prompt, whose gain is not
            measured. None: in steps without long chunks, and not with ``batch_invariant``.
        batch_invariant: give every log-probability the same bits for any other requests and their order,
            chunks of prompts, cached prefixes, preemption, guesses, and with CUDA graphs or without. All sums
            then have one order, which costs speed. Not with ``cascade_attention=True``, several processes or
            ``tree_width`` above 1, and on a GPU neither in float32 nor with a vocabulary whose size is no
            multiple of 8.
        swap_space: GiB of host memory that preempted sequences are swapped to. 0: preempted sequences are
            recomputed.
        async_scheduling: launch a step before the results of the previous one are read. None: on a GPU only.
        enforce_eager: use no CUDA graphs.
        quantization: None, or "fp8": the layers' matrices, except those of experts, are rounded to e4m3 as
            they are loaded, with a scale for each row.
        speculative_config: guess several tokens and verify them in one step; the answers stay the same.
            ``{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1}`` guesses the tokens that followed an earlier occurrence of the last few
            tokens.
            ``{"method": "draft_model", "model": folder, "num_speculative_tokens": 4, "tree_width": 1}``
            guesses with a small model of the same vocabulary: its ``tree_width`` likeliest tokens at each
            position.
        logprobs_mode: what ``logprobs`` of an answer's tokens are: "raw_logprobs", log-probabilities of the
            model's own logits; "processed_logprobs", those after everything that changes the draw (penalties,
            biases, structures, temperature, filters); "raw_logits" or "processed_logits", without the
            softmax. ``prompt_logprobs`` and beam search have raw log-probabilities.
        warmup: on a GPU, compile the kernels of all steps before the constructor returns, in parallel
            processes, so that no request waits for the compiler. Triton's cache keeps the kernels.
        tensor_parallel_size: number of processes that compute the model together, one for each GPU.
            ``torchrun`` starts them, and each runs the same program.
        generation_config: where the defaults of sampling come from: "auto" (generation_config.json of the
            model's folder), "vllm" (those of :class:`SamplingParams`), or another folder.

    Other arguments of vLLM are accepted with values that change nothing here, and refused by name otherwise
    (:mod:`flashtile.checks.vllm_arguments`).

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError, TypeError, NotImplementedError: an argument or the model is invalid or not supported.
        ModuleNotFoundError: a package is missing (``pip install 'flashtile[engine]'``).

    Examples:
        >>> import json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())  # of a checkpoint; here a small model without weights
        >>> config = {"model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
        >>> config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> _ = (folder / "config.json").write_text(json.dumps(config))
        >>> llm = flashtile.LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=64)
        >>> greedy = flashtile.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        >>> (request,) = llm.generate({"prompt_token_ids": [3, 1, 4]}, greedy, use_tqdm=False)
        >>> len(request.outputs[0].token_ids), request.outputs[0].finish_reason
        (5, 'length')
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype = "auto",
        load_format: str = "auto",
        device: str | torch.device | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        block_size: int | None = None,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool | None = None,
        cascade_attention: bool | None = None,
        batch_invariant: bool = False,
        swap_space: float = 0,
        async_scheduling: bool | None = None,
        enforce_eager: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        logprobs_mode: str = "raw_logprobs",
        warmup: bool = True,
        generation_config: str | Path = "auto",
    ):
        processes = as_int_within("tensor_parallel_size", tensor_parallel_size, 1, 2**10)
        prefix_caching = True if enable_prefix_caching is None else enable_prefix_caching
        beside_chunks = cascade_attention is True
        cascade_attention = not batch_invariant if cascade_attention is None else cascade_attention
        _check_choices(
            quantization, load_format, enable_prefix_caching=prefix_caching,
            cascade_attention=cascade_attention, enforce_eager=enforce_eager, warmup=warmup,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        if not is_choice(logprobs_mode, LOGPROBS_MODES):
            modes = ", ".join(LOGPROBS_MODES)
            raise ValueError(f"logprobs_mode must be one of {modes}, got {logprobs_mode!r:.60}")
        seed = as_int("seed", seed)
        speculation = None if speculative_config is None else read_speculative_config(speculative_config)
        folder = model_folder(model)
        config, self.sampling_defaults = read_config(folder), _sampling_defaults(generation_config, folder)
        check_divides(config, processes)
        place = local_device() if device is None and processes > 1 else device
        self.device = machine.find_device(None if place is None else str(place))
        self.dtype = _weight_dtype(dtype, config, self.device, quantization)
        cache_dtype = _cache_dtype(kv_cache_dtype, self.dtype)
        if batch_invariant:
            width = 1 if speculation is None else speculation.tree_width
            own = None if self.device.type == "cpu" else self.dtype
            _check_invariant(cascade_attention, processes, width, own, config.vocab_size)
        length = min(config.max_position_embeddings, MAX_DEFAULT_LENGTH)
        if max_model_len is not None:
            length = as_int_within("max_model_len", max_model_len, 1, config.longest_sequence)
        utilization, host_bytes = _memory_limits(gpu_memory_utilization, swap_space)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 8192 if self.device.type == "cuda" else 1024
        budget = as_int_within("max_num_batched_tokens", max_num_batched_tokens, 1, 2**20)
        seqs = (
            min(256, budget)
            if max_num_seqs is None
            else as_int_within("max_num_seqs", max_num_seqs, 1, 2**16)
        )
        if seqs > budget:
            raise ValueError(f"max_num_batched_tokens must be at least max_num_seqs={seqs}, got {budget}")
        text = None if skip_tokenizer_init else _fitting_tokenizer(tokenizer or folder, config)
        draft_config = _draft_config(speculation, config) if isinstance(speculation, DraftModel) else None
        ranks = ProcessRanks(processes, self.device) if processes > 1 else ALONE
        if self.device.type == "cuda":
            threading.Thread(target=_import_kernels, args=(self.device,), daemon=True).start()
        load = functools.partial(
            self._load, seed=seed if load_format == "dummy" else None,
            positions=min(length, budget), fp8=quantization == "fp8",
        )  # fmt: skip
        network, draft = load(folder, config, ranks, invariant=batch_invariant), None
        self.model_config = network.config
        windows = config.windows
        if isinstance(speculation, DraftModel) and draft_config is not None:
            draft = load(speculation.model, draft_config, ALONE)
            windows += draft_config.windows
        size = 16 if block_size is None else as_int_within("block_size", block_size, 1, 1024)
        block_bytes = bytes_of_block(network, size, cache_dtype)
        if draft is not None:
            block_bytes += bytes_of_block(draft, size, self.dtype)
        if num_gpu_blocks_override is not None:
            blocks = as_int_within("num_gpu_blocks_override", num_gpu_blocks_override, 2, 2**30)
        else:
            if kv_cache_memory_bytes is None:
                memory = memory_left(network, budget, size, utilization)
                memory -= bytes_of_tables(network, length, seqs, size, memory // block_bytes)
            else:
                memory = as_int("kv_cache_memory_bytes", kv_cache_memory_bytes)
            blocks = min(seqs * -(-length // size) + 1, memory // block_bytes)
        blocks = ranks.minimum(blocks)
        if blocks < 2:
            raise ValueError(
                f"kv_cache_memory_bytes must hold two blocks of {block_bytes} bytes, got room for {blocks}"
            )
        # The KV caches may drop keys that lie before the largest window, if all layers have one.
        window = max(windows) if min(windows) >= 0 else -1
        is_free = max_model_len is None and num_gpu_blocks_override is None and window < 0
        if is_free and blocks * size < length:
            length = blocks * size
            logger.warning("max_model_len is reduced to %d tokens, which fill the KV cache", length)
        if (seqs + 1) * -(-length // size) >= 2**31:
            got = f"{seqs} * {length} / {size}"
            raise ValueError(f"max_num_seqs * max_model_len / block_size must be below 2^31, got {got}")
        for one in filter(None, (network, draft)):
            one.set_positions(length)
        manager = BlockManager(
            blocks, size, max_sequences=seqs, max_seqlen=length,
            num_host_blocks=int(host_bytes) // block_bytes, window_left=window,
        )  # fmt: skip
        token_bytes = bytes_of_block(network, 1, cache_dtype) // config.num_layers
        groups = None
        if cascade_attention:
            groups = PrefixGroups(manager, config.windows, token_bytes, beside_chunks)
        scheduler = Scheduler(manager, budget, prefix_caching, groups)
        runner = Runner(
            network, manager, cache_dtype, budget, capture=not enforce_eager, draft=draft,
            parents=comb(speculation.num_speculative_tokens, speculation.tree_width) if speculation else (),
            logprobs_mode=logprobs_mode,
        )  # fmt: skip
        overlap = self.device.type == "cuda" if async_scheduling is None else bool(async_scheduling)
        self.engine = Engine(runner, scheduler, text, seed=seed, overlap=overlap, speculator=speculation)
        if warmup:
            warm_up(self.device, _steps_of(runner, groups is not None))
        self._ids = itertools.count()
        self._finished: dict[str, RequestOutput] = {}  # not returned to the caller yet

    @takes_also(CALL_ARGUMENTS, SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts in one batch. The answers come in the order of the prompts.

        Args:
            prompts: a prompt or a list of them. A prompt is a text, ``{"prompt_token_ids": [...]}`` or a list
                of tokens.
            sampling_params: one for all prompts, or a list with one for each. None:
                :meth:`get_default_sampling_params`.
            priority: an integer for all prompts, or one for each; lower values are scheduled first.

        Of vLLM's other arguments, ``use_tqdm`` is ignored: to show progress, call ``engine.step`` yourself.
        The others must have their defaults, here and in the other methods.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument is invalid or not supported. Nothing is
                computed then.
        """
        return self._run(prompts, sampling_params, priority)

    @takes_also(CALL_ARGUMENTS, SamplingParams)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue a conversation, or each of a list of conversations.

        Args:
            messages: a list of dicts with ``role`` and ``content``, or a list of such lists.
            sampling_params, priority: as in :meth:`generate`.
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: as
                in :meth:`flashtile.engine.tokenizer.Tokenizer.apply_chat_template`.
        """
        tokenizer = self.get_tokenizer()
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [
            tokenizer.apply_chat_template(
                conversation, chat_template, add_generation_prompt, continue_final_message, tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]  # fmt: skip
        tokens: Any = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, False)} for text in prompts
        ]
        return self._run(tokens[0] if one else tokens, sampling_params, priority, "messages")

    @takes_also(CALL_ARGUMENTS, BeamSearchParams)
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the likeliest continuations of each prompt, the best first in ``outputs``.

        Prompts and errors are as in :meth:`generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        return self._run(prompts, params, priority)

    @takes_also(CALL_ARGUMENTS)
    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Return the log-probability of each token of a sequence but the first, given those before it.

        A sequence is computed in one pass, or in chunks of ``max_num_batched_tokens``. With
        ``batch_invariant``, the numbers are bitwise those of ``logprobs`` when the tokens were generated.

        Args:
            prompts: one or several, as in :meth:`generate`, with at least two tokens and at most
                ``max_model_len``: for example those of a prompt and its answer.

        Raises:
            TypeError, ValueError, NotImplementedError: as :meth:`generate`; also for another
                ``logprobs_mode`` than "raw_logprobs".
            RuntimeError: the model's logits are NaN or infinite.
        """
        named = _as_prompts(prompts)
        requests = [self.engine.score_request(prompt, name) for name, prompt in named]
        outputs = self._run([tokens[:-1] for tokens, _ in requests], [one for _, one in requests], None)
        return [
            scores(tokens, output, name)
            for (name, _), (tokens, _), output in zip(named, requests, outputs, strict=True)
        ]

    @takes_also(CALL_ARGUMENTS, SamplingParams)
    def enqueue(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams, priority: int = 0
    ) -> list[str]:
        """Queue prompts and return their request ids. Nothing is computed yet.

        Call :meth:`wait_for_completion` for the answers.
        """
        many = _as_prompts(prompts)
        return self._add(many, [sampling_params] * len(many), [priority] * len(many))

    @takes_also(CALL_ARGUMENTS)
    def wait_for_completion(self) -> list[RequestOutput]:
        """Compute until every queued request is finished. Return the outputs in the order of their ids."""
        while self.engine.has_unfinished:
            self._step()
        finished, self._finished = self._finished, {}
        return sorted(finished.values(), key=lambda output: (len(output.request_id), output.request_id))

    def get_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ValueError("skip_tokenizer_init must be False to use the tokenizer, got True")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: those of the model's generation_config.json."""
        return SamplingParams(**self.sampling_defaults)

    def get_metrics(self) -> EngineStats:
        """Return the engine's present state and its totals since the start."""
        return self.engine.stats()

    @takes_also(RESET_ARGUMENTS)
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, so that later prompts reuse no blocks. Always returns True.

        Args:
            reset_running_requests: unfinished requests give up their keys and values as well. The next step
                preempts them, and later steps compute their tokens again; answers stay. False: they keep
                their blocks, which enter the prefix cache again later. In vLLM, the cache then stays as it
                is, and the result is False.
        """
        self.engine.reset_prefix_cache(reset_running_requests)
        return True

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Replace all weights of the model in place, for example after a step of its training.

        Compiled kernels and CUDA graphs stay, and the prefix cache is emptied. A draft model keeps its
        weights. With ``tensor_parallel_size``, every process must call this, with the same whole weights.

        Args:
            named_tensors: a folder as ``model``, or all weights under the names of the checkpoint: a dict or
                pairs of name and whole tensor, on any device, in any floating-point dtype. Dense models of
                Transformers have these names in ``model.named_parameters()``.

        Raises:
            TypeError, ValueError, NotImplementedError, FileNotFoundError: a request is unfinished, or a
                weight is missing, unknown, of another shape, sparse, without memory, or a tensor of the
                engine itself. Nothing is changed then. After any other error, such as one of a disk, requests
                are refused until an update succeeds.
        """
        self.engine.update_weights(named_tensors)

    @takes_also(SLEEP_ARGUMENTS)
    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of the weights until :meth:`wake_up`.

        Kernels stay compiled; CUDA graphs are captured again. Names are those of vLLM. With
        ``tensor_parallel_size``, every process must call this and :meth:`wake_up`.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them: call :meth:`wake_up`, then
                :meth:`update_weights`. A draft model keeps its weights.

        Raises:
            ValueError: a request is unfinished, or the engine sleeps already.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that :meth:`sleep` freed. Has no effect on memory that is allocated.

        It may be called again after an error because of too little memory.

        Args:
            tags: "weights" and "kv_cache", or one of them, to allocate the cache only after the weights are
                updated. None: both.
        """
        self.engine.wake_up(tags)

    def close(self) -> None:
        """Wait for the device and free the CUDA graphs.

        Call it before you destroy a process group, because NCCL may wait for the graphs. Graphs are also
        freed when the process ends. Later requests capture new graphs.
        """
        self.engine.runner.close()

    def __getattr__(self, name: str) -> Any:
        if name in NO_METHODS:
            raise AttributeError(f"LLM has no {name}: {NO_METHODS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _run(
        self, prompts: Any, params: Any, priority: int | Sequence[int] | None, name: str = "prompts"
    ) -> list[RequestOutput]:
        many = _as_prompts(prompts, name)
        params = self.get_default_sampling_params() if params is None else params
        params = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(params) != len(many):
            raise ValueError(f"expected {len(many)} sampling_params (one per prompt), got {len(params)}")
        priorities = list(priority) if isinstance(priority, Sequence) else [priority or 0] * len(many)
        if len(priorities) != len(many):
            raise ValueError(f"expected {len(many)} priorities (one per prompt), got {len(priorities)}")
        ids = self._add(many, params, priorities)
        left = set(ids)
        try:
            while left:
                left.difference_update(self._step())
        except BaseException:
            self.engine.abort(left)
            for one in ids:
                self._finished.pop(one, None)
            raise
        return [self._finished.pop(one) for one in ids]

    def _step(self) -> dict[str, RequestOutput]:
        """Compute one step. Return the outputs of all requests that it finished, by request id."""
        finished = {output.request_id: output for output in self.engine.step() if output.finished}
        self._finished |= finished
        return finished

    def _add(self, prompts: list[tuple[str, Prompt]], params: list[Any], priorities: list[int]) -> list[str]:
        """Queue all prompts and return their request ids. If a prompt is refused, no prompt stays queued."""
        ids: list[str] = []
        try:
            for (name, prompt), one, priority in zip(prompts, params, priorities, strict=True):
                if isinstance(one, SamplingParams):  # this class returns no other output
                    one = copy.copy(one)
                    one.output_kind = RequestOutputKind.FINAL_ONLY
                request_id = str(next(self._ids))
                self.engine.add_request(request_id, prompt, one, priority=priority, name=name)
                ids.append(request_id)
        except BaseException:
            self.engine.abort(ids)
            raise
        return ids

    @torch.inference_mode()
    def _load(
        self, folder: Path, config: ModelConfig, ranks: Ranks, *, seed: int | None, positions: int, fp8: bool,
        invariant: bool = False,
    ) -> Model:  # fmt: skip
        """Load the model from its folder, or with random weights if ``seed`` is given."""
        if seed is not None:
            weights = random_weights(config, self.device, self.dtype, seed, ranks)
        else:
            config = with_checkpoint_head(folder, config, self.dtype)
            weights = open_weights(folder, config, self.device, self.dtype, ranks)
        return Model(config, weights, positions, ranks, fp8, invariant)


def _as_prompts(prompts: Any, name: str = "prompts") -> list[tuple[str, Prompt]]:
    """Return each prompt with its name in errors. A single prompt has the name of the argument."""
    if isinstance(prompts, (str, Mapping)):
        return [(name, prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    if prompts and not isinstance(prompts[0], (str, Mapping, list, tuple)):
        return [(name, list(prompts))]
    return [(f"{name}[{i}]", prompt) for i, prompt in enumerate(prompts)]


def _sampling_defaults(source: str | Path, folder: Path) -> dict[str, Any]:
    """Read and validate the defaults that ``generation_config`` of :class:`LLM` names.

    Null fields count as absent. ``do_sample`` is ignored, as in vLLM.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"generation_config must be 'auto', 'vllm' or a folder, got {type(source).__name__}")
    path = Path(folder if source == "auto" else source, "generation_config.json")
    if source == "vllm" or (source == "auto" and not path.is_file()):
        return {}
    if not path.is_file():
        raise FileNotFoundError(
            "generation_config must be 'auto', 'vllm' or a folder with a generation_config.json, "
            f"got {str(source)!r:.200}"
        )
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    values = read_json(path).items()
    found = {names[name]: value for name, value in values if name in names and value is not None}
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


def _check_choices(quantization: Any, load_format: Any, **flags: Any) -> None:
    if not is_choice(quantization, (None, "fp8")):
        raise NotImplementedError(f"quantization must be None or 'fp8', got {quantization!r:.60}{IN_VLLM}")
    if not is_choice(load_format, ("auto", "safetensors", "dummy")):
        raise ValueError(f"load_format must be auto, safetensors or dummy, got {load_format!r:.60}")
    for name, value in flags.items():
        check_flag(name, value)


def _weight_dtype(
    dtype: Any, config: ModelConfig, device: torch.device, quantization: str | None
) -> torch.dtype:
    found: Any = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if is_choice(dtype, ("auto",)):
        found = torch.float32 if device.type == "cpu" else DTYPES[config.dtype]
    if not is_choice(found, tuple(DTYPES.values())):
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r:.60}")
    if quantization is not None and found == torch.float32:
        raise ValueError("dtype must be bfloat16 or float16 with quantization='fp8', got float32")
    assert isinstance(found, torch.dtype)
    return found


def _check_invariant(cascade: bool, processes: int, tree_width: int, dtype: Any, vocab_size: int) -> None:
    """Refuse what adds in an order that depends on the batch. ``dtype`` is None on a CPU."""
    for name, got, is_fixed, needed in (
        ("cascade_attention", cascade, not cascade, "False"),
        ("tensor_parallel_size", processes, processes == 1, "1"),
        ("tree_width", tree_width, tree_width == 1, "1"),
        ("dtype", dtype, dtype != torch.float32, "bfloat16 or float16 on a GPU"),
        # On a GPU, torch's softmax of a row begins at the first address that is a multiple of 16 bytes.
        ("vocab_size", vocab_size, dtype is None or vocab_size % 8 == 0, "a multiple of 8 on a GPU"),
    ):
        if not is_fixed:
            raise NotImplementedError(f"{name} must be {needed} with batch_invariant, got {got}")


def _memory_limits(gpu_memory_utilization: Any, swap_space: Any) -> tuple[float, float]:
    """Validate the memory limits and return (share of the GPU's memory, bytes of host memory)."""
    utilization = as_float("gpu_memory_utilization", gpu_memory_utilization, "a number")
    host_bytes = as_float("swap_space", swap_space, "a number") * 2**30
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    if not 0 <= host_bytes < 2**63:
        raise ValueError(f"swap_space must be at least 0 and below 2^33 GiB, got {swap_space}")
    return utilization, host_bytes


def _fitting_tokenizer(folder: str | Path, config: ModelConfig) -> Tokenizer:
    tokenizer = load_tokenizer(model_folder(folder, "tokenizer"), config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"tokenizer must have at most the model's vocab_size={config.vocab_size} tokens, "
            f"got {tokenizer.vocab_size}"
        )
    return tokenizer


def _cache_dtype(name: Any, dtype: torch.dtype) -> torch.dtype:
    if not is_choice(name, tuple(CACHE_DTYPES)):
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {name!r:.60}")
    return CACHE_DTYPES[name] or dtype


def _draft_config(settings: DraftModel, config: ModelConfig) -> ModelConfig:
    """Read the draft model's config and check that the target model can use it."""
    draft = read_config(settings.model)
    if draft.vocab_size != config.vocab_size:
        raise ValueError(
            "speculative_config must name a draft model with the model's "
            f"vocab_size={config.vocab_size}, got {draft.vocab_size}"
        )
    if settings.tree_width > 1 and max(*config.windows, *draft.windows) >= 0:
        raise NotImplementedError(
            f"tree_width must be 1 for models with sliding windows, got {settings.tree_width}"
        )
    return draft


def _steps_of(runner: Runner, grouped: bool = False) -> list[tuple[ModelConfig, Limits, bool]]:
    """Return the arguments of :func:`flashtile.engine.step_calls.step_calls` for the models of a runner.

    ``grouped``: whether steps may have groups of sequences that share keys.
    """
    manager, model = runner.manager, runner.model
    limits = Limits(
        max_model_len=manager.table.max_blocks * manager.block_size,
        max_num_seqs=manager.table.max_sequences,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        block_size=manager.block_size,
        num_blocks=runner.memory.k.shape[1],
        cache_dtype=runner.memory.k.dtype,
        fp8=model.fp8,
        captured=runner.capture is not None,
        verified=runner.max_verified,
        siblings=runner.has_siblings,
        world=model.ranks.world,
        grouped=grouped,
        invariant=model.head.invariant,
    )
    name = str(model.embedding.dtype).removeprefix("torch.")
    found = [(replace(model.config, dtype=name), limits, False)]
    if runner.drafter is not None:
        own = replace(limits, cache_dtype=None, world=1, invariant=False)
        found.append((replace(runner.drafter.model.config, dtype=name), own, True))
    return found


def _import_kernels(device: torch.device) -> None:
    """Import the kernels that the first step needs. Runs in a thread while weights are read."""
    import flashtile.backends.portable.decode.launch
    import flashtile.backends.portable.linear.launch

    if torch.cuda.get_device_capability(device) == (9, 0):
        import flashtile.backends.hopper.decode.launch
        import flashtile.backends.hopper.linear.launch  # noqa: F401
