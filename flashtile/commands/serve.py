"""``flashtile serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flashtile.commands.options import bad_parameters

KEY = "FLASHTILE_API_KEY"


def serve(
    model: Annotated[Path, typer.Argument(help="A folder in Hugging Face's format.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"A key that calls must bring; several allowed. ${KEY} hides it from other users."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of another tokenizer.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, safetensors or dummy (random).")] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: cuda if present.")] = None,
    seed: Annotated[int, typer.Option(help="Of calls without one.")] = 0,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences computed at a time.")] = 256,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in a step.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to take.")] = 0.9,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="For keys and values, instead.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block of keys and values.")] = 16,
    swap_space: Annotated[float, typer.Option(help="GiB of host memory for preempted sequences.")] = 0.0,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Find equal beginnings again.")] = True,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    max_concurrent_requests: Annotated[int, typer.Option(help="Calls at a time; others get 429.")] = 1024,
    max_prompts: Annotated[int, typer.Option(help="Prompts in one call.")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Of one prompt.")] = None,
    max_logprobs: Annotated[int, typer.Option(help="Log-probabilities at a position.")] = 20,
    max_body_bytes: Annotated[int, typer.Option(help="Of one call.")] = 2**24,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a body to come.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds for an answer to end.")] = 600.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for calls to end after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model: /v1/completions, /v1/chat/completions and more, and a page at / to watch it."""
    try:
        from flashtile.engine import LLM
        from flashtile.engine.server.run import serve as run
        from flashtile.engine.server.service import Limits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("flashtile", "torch", "triton"):
            raise
        raise typer.BadParameter(f"serving needs {error.name}: pip install 'flashtile[serve]'") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    keys = api_key or ([os.environ[KEY]] if os.environ.get(KEY) else [])
    with bad_parameters():
        limits = Limits(
            tuple(keys), max_concurrent_requests, max_prompts, max_prompt_tokens, max_logprobs,
            max_body_bytes, body_timeout, request_timeout,
        )  # fmt: skip
        if not 0 <= shutdown_timeout < float("inf"):
            raise ValueError(f"shutdown_timeout must be at least 0 and finite, got {shutdown_timeout}")
        try:
            llm = LLM(
                model, tokenizer=tokenizer, dtype=dtype, kv_cache_dtype=kv_cache_dtype, device=device,
                load_format=load_format, seed=seed, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens, gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_memory_bytes=kv_cache_memory_bytes, block_size=block_size, swap_space=swap_space,
                enable_prefix_caching=enable_prefix_caching, enforce_eager=enforce_eager,
            )  # fmt: skip
        except (OSError, ModuleNotFoundError) as error:
            raise ValueError(str(error)) from None

    def started(server: Any) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"serving {server.service.model_name} at http://{shown}:{server.port}", err=True)

    try:
        code = run(llm, served_model_name or str(model), limits, host, port, shutdown_timeout, started)
    except OSError as error:
        raise typer.BadParameter(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    raise typer.Exit(code)
