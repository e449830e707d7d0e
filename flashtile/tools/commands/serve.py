"""``flashtile serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from flashtile.checks.vllm_arguments import SERVE_ARGUMENTS
from flashtile.tools.commands.options import (
    CacheDtype,
    Device,
    MaxModelLen,
    ModelDtype,
    as_arguments,
    bad_models,
    bad_parameters,
    check_option,
    parse_device,
    read_options,
)

KEY = "FLASHTILE_API_KEY"
"""Environment variable with the keys that calls must send, one in a line."""
TORCHRUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")  # fmt: skip


SHORT_OPTIONS = {
    "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size", "-ep": "--enable-expert-parallel", "-q": "--quantization",
    "-n": "--nnodes", "-r": "--node-rank", "-cc": "--compilation-config", "-O": "--optimization-level",
    "-ac": "--attention-config", "-dpn": "--data-parallel-rank", "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port", "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb", "-dph": "--data-parallel-hybrid-lb",
    "-dpm": "--data-parallel-multi-port-external-lb", "-pcp": "--prefill-context-parallel-size",
    "-asc": "--api-server-count", "-dc": "--diffusion-config", "-sc": "--speculative-config",
}  # fmt: skip
"""Short options of ``vllm serve``."""


def whole_option(word: str) -> str:
    """Return a word of the command line with its option in full: ``-tp=2``, ``--max_model_len``."""
    option, equals, value = word.partition("=")
    if option.startswith("--"):
        option = option.replace("_", "-")
    return SHORT_OPTIONS.get(option, option) + equals + value


class VllmCommand(TyperCommand):
    """A command that also takes the options of ``vllm serve`` that change nothing, and refuses the others.

    Options may be written as vLLM allows: short, and with ``_`` for ``-``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for one in self.get_params(ctx) for option in (*one.opts, *one.secondary_opts)}
        rest, words = [], list(args)
        while words:
            word = whole_option(words.pop(0))
            option, has_value, text = word.partition("=")
            name = option[2:].replace("-", "_")
            on = name in SERVE_ARGUMENTS
            name = name if on else name.removeprefix("no_")
            if word == "--" or not word.startswith("--") or option in own or name not in SERVE_ARGUMENTS:
                rest.append(word)
                continue
            value: Any = on
            if not SERVE_ARGUMENTS[name].flag:
                if not has_value and (not words or words[0].startswith("--")):
                    raise typer.BadParameter(f"{option} needs a value")
                value = _json_or_text(text if has_value else words.pop(0))
            check_option(name, value)
        return super().parse_args(ctx, rest)


COMMAND_CLASS = VllmCommand


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def serve(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(help="A folder in Hugging Face's format, or a name in its local cache.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"A key that calls must send; repeatable. In ${KEY} other users cannot see keys."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of another tokenizer.")] = None,
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option("--skip-tokenizer-init", help="No tokenizer: prompts and answers are tokens."),
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(help="Sampling defaults: auto (the model's generation_config.json), vllm or a folder."),
    ] = "auto",
    dtype: ModelDtype = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="fp8 rounds the layers' matrices to e4m3 as they are loaded.")
    ] = None,
    load_format: Annotated[str, typer.Option(help="Weights: auto, safetensors or dummy (random).")] = "auto",
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Seed of calls without one.")] = 0,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences computed at a time. Default: 256.")
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens of a step.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to take.")] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Bytes for keys and values, instead of a share.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block of keys and values.")] = 16,
    swap_space: Annotated[float, typer.Option(help="GiB of host memory for preempted sequences.")] = 0.0,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="Blocks of keys and values, instead of a share.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the blocks of equal prefixes.")] = True,
    async_scheduling: Annotated[
        bool | None, typer.Option(help="Schedule a step while the one before runs. Default: on GPUs.")
    ] = None,
    cascade_attention: Annotated[
        bool | None,
        typer.Option(help="Read blocks that sequences share once. Default: unless --batch-invariant."),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Log-probabilities with the same bits in every batch.")
    ] = False,
    logprobs_mode: Annotated[
        str,
        typer.Option(
            help="Log-probabilities: raw_logprobs, processed_logprobs, raw_logits or processed_logits."
        ),
    ] = "raw_logprobs",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    warmup: Annotated[bool, typer.Option(help="Compile all kernels before the first call.")] = True,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='JSON: {"method": "ngram"} or a draft "model", for several tokens per step.'),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Replicas, each with its own GPUs.")] = 1,
    tool_call_parser: Annotated[
        str, typer.Option(help="Format of tool calls: auto, none, hermes, llama3_json, mistral or openai.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="Format of reasoning: auto, none, deepseek_r1, qwen3 or openai_gptoss.")
    ] = "auto",
    max_concurrent_requests: Annotated[int, typer.Option(help="Most calls at once; others get 429.")] = 1024,
    max_prompts: Annotated[int, typer.Option(help="Most prompts in one call.")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Most tokens of one prompt.")] = None,
    max_logprobs: Annotated[int, typer.Option(help="Most log-probabilities per position.")] = 20,
    max_body_bytes: Annotated[int, typer.Option(help="Most bytes of one call's body.")] = 2**24,
    max_total_body_bytes: Annotated[
        int, typer.Option(help="Most bytes of all calls' bodies at a time; others get 429.")
    ] = 2**30,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a body to arrive.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds for an answer to end.")] = 600.0,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds that a connection may be without a call or complete headers.")
    ] = 75.0,
    max_connections: Annotated[
        int, typer.Option(help="Most open connections; beyond this, the one idle the longest is closed.")
    ] = 4096,
    max_priority: Annotated[
        int, typer.Option(help="Calls may set a priority from minus this to this; lower runs first.")
    ] = 0,
    access_log: Annotated[bool, typer.Option(help="Log a line for each call.")] = True,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose web pages may call; repeatable; * is all.")
    ] = None,
    server_dev_mode: Annotated[
        bool,
        typer.Option(
            "--server-dev-mode",
            help="Also /sleep, /wake_up, /is_sleeping and /update_weights_from_disk, for trainers. "
            "Any client can then stop the engine.",
        ),
    ] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate in PEM: calls are HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, without a password.")] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Authorities, one of which must have issued a client's certificate.")
    ] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for calls to end after SIGTERM.")] = 30.0,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_options, is_eager=True, help="TOML or JSON file of options; the command line wins."
        ),
    ] = None,
) -> None:
    """Serve a model: /v1/completions, /v1/chat/completions and more, and a page at / to watch it."""
    try:
        from flashtile.engine import LLM, parallel
        from flashtile.engine.config import model_folder, read_config
        from flashtile.engine.server.formats import check_parsers
        from flashtile.engine.server.listener import tls_context
        from flashtile.engine.server.replicas import end_with_stdin
        from flashtile.engine.server.run import Server
        from flashtile.engine.server.run import serve as run
        from flashtile.engine.server.service import Limits
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # As it ends, Python collects garbage several times, which takes seconds with the objects of torch.
    atexit.register(gc.freeze)
    keys = api_key or os.environ.get(KEY, "").splitlines()

    def given(names: Iterable[str]) -> dict[str, Any]:
        """Return the options with these names. Most options are arguments of Limits or LLM."""
        return {name: context.params[name] for name in names if name in context.params}

    with bad_parameters():
        options = given(field.name for field in fields(Limits))
        options |= {"api_keys": tuple(keys), "cors_origins": tuple(cors_origin or ())}
        limits = Limits(**options | {"tls": tls_context(ssl_certfile, ssl_keyfile, ssl_ca_certs)})
        if not 0 <= shutdown_timeout < float("inf"):
            raise ValueError(f"shutdown_timeout must be at least 0 and finite, got {shutdown_timeout}")
        if server_dev_mode and data_parallel_size > 1:
            # A replica that is started again would have the weights of its start.
            raise ValueError(f"server_dev_mode must be off with data_parallel_size={data_parallel_size}")
        formats = check_parsers(tool_call_parser, reasoning_parser)
        speculation = _json_object("speculative_config", speculative_config)
    shown, scheme = f"[{host}]" if ":" in host else host, "http" if limits.tls is None else "https"

    def announce(number: int) -> None:
        typer.echo(f"serving {served_model_name or model} at {scheme}://{shown}:{number}", err=True)

    if data_parallel_size > 1:
        with bad_parameters():
            environments = environments_of(data_parallel_size, tensor_parallel_size, device)
        # All users of a machine can read command lines, so replicas find the keys in their environments.
        environments = [{**one, KEY: "\n".join(keys)} for one in environments]
        with bad_models():  # report the error once, not once per replica
            read_config(model_folder(model))
        own = as_arguments(
            context, api_key=None, data_parallel_size=1, host="127.0.0.1", port=0, access_log=False,
            idle_timeout=75.0, cors_origin=None, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None,
        )  # fmt: skip
        _serve_replicas(own, environments, limits, host, port, shutdown_timeout, announce)
    others: list[Any] = []
    if tensor_parallel_size > 1 and "LOCAL_RANK" not in os.environ:
        # The other processes answer no calls, so they need no keys.
        command, own_device = command_of(as_arguments(context, api_key=None)), parse_device(device)
        with bad_models():  # report the error once, not once per process
            parallel.check_divides(read_config(model_folder(model)), tensor_parallel_size)
        others, _store = parallel.start_others(command, tensor_parallel_size, own_device)
    elif os.environ.get("RANK", "0") != "0":
        for number in (signal.SIGTERM, signal.SIGINT):  # the first process decides when to stop
            signal.signal(number, signal.SIG_IGN)
    end_with_stdin()
    with bad_models():
        options = given(signature(LLM).parameters) | {"model": model, "tokenizer": tokenizer}
        llm = LLM(**options | {"speculative_config": speculation})
    engine = llm.engine
    if engine.runner.ranks.rank:
        try:
            parallel.repeat_changes(engine)
        except EOFError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        raise typer.Exit
    if tensor_parallel_size > 1:
        parallel.broadcast_changes(engine)
    try:
        server = Server(llm, served_model_name or str(model), limits, host, port, formats)
        code = run(server, shutdown_timeout, lambda server: announce(server.port))
    except OSError as error:
        raise _taken(host, port, error) from None
    if tensor_parallel_size > 1 and code == 0:
        parallel.end_repeating(engine)
        for process in others:
            process.wait()
    raise typer.Exit(code)


def _serve_replicas(
    arguments: list[str], environments: list[dict[str, str]], limits: Any, host: str, port: int,
    shutdown_timeout: float, announce: Callable[[int], None],
) -> NoReturn:  # fmt: skip
    from flashtile.engine.server.replicas import Replica, serve_replicas

    replicas = [Replica(i, command_of(arguments), environment) for i, environment in enumerate(environments)]
    try:
        code = serve_replicas(replicas, limits, host, port, shutdown_timeout, announce)
    except OSError as error:
        raise _taken(host, port, error) from None
    raise typer.Exit(code)


def command_of(arguments: list[str]) -> list[str]:
    """Return the command of ``flashtile serve`` in a separate process."""
    return [sys.executable, "-m", "flashtile", "serve", *arguments]


def environments_of(replicas: int, processes: int, device: str | None) -> list[dict[str, str]]:
    """Return the environment of each replica, which sees only its own GPUs unless ``device`` is given."""
    import torch

    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    if device is not None or not torch.cuda.is_available():
        return [environment] * replicas
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(torch.cuda.device_count())] if seen is None else seen.split(",")
    if replicas * processes > len(gpus):
        raise ValueError(
            f"data_parallel_size * tensor_parallel_size must be at most the {len(gpus)} GPUs here, "
            f"got {replicas} * {processes}"
        )
    return [
        {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * processes : (i + 1) * processes])}
        for i in range(replicas)
    ]


def _missing(error: ModuleNotFoundError) -> typer.BadParameter:
    """Return the error for a missing package of the extra ``serve``. Raise the error of any other module."""
    if error.name is None or error.name.split(".")[0] in ("flashtile", "torch", "triton"):
        raise error
    return typer.BadParameter(f"serving needs {error.name}: pip install 'flashtile[serve]'")


def _taken(host: str, port: int, error: OSError) -> typer.BadParameter:
    return typer.BadParameter(f"cannot listen at {host}:{port}: {error.strerror or error}")


def _json_object(name: str, text: str | None) -> dict[str, Any] | None:
    try:
        found = None if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON: {error}") from None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{name} must be a JSON object, got {text:.60}")
    return found
