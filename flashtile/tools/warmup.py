"""``flashtile.warmup``: compiles the kernels of a program before they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

import torch

from flashtile.checks.arguments import check_choice
from flashtile.compilation.ahead import Sources, compile_in_process, target_of
from flashtile.compilation.calls import Call, read_calls
from flashtile.compilation.compiling import Compiled
from flashtile.tools.workload_calls import PURPOSES, model_calls, read_model


def warmup(
    calls: str | os.PathLike[str] | Iterable[Call] | None = None,
    device: torch.device | str | None = None,
    workers: int | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    purpose: str = "both",
) -> Compiled:
    """Compile the kernels of calls, or of a model, for this machine's GPU, before they are needed.

    Kernels compile in parallel processes. They are kept in Triton's cache, where the first call of this or a
    later process finds them. An empty file in this cache marks them as compiled, so the next warm-up with the
    same calls returns at once, with 0 kernels.

    Args:
        calls: file that :func:`record_calls` wrote, or the calls. Omitted if ``model`` is given.
        device: the GPU. Default: torch's current one.
        workers: number of processes that compile; by default one for each core, at most 32.
        model: folder of a Hugging Face model, its config file, or its name in Hugging Face's cache.
        purpose: what the model is used for. "training": attention in both passes. "serving": the steps of
            ``LLM`` with its default settings, which ``LLM`` itself also compiles. "both". Without ``model``
            it must be "both".

    Raises:
        FileNotFoundError: there is no such file or model.
        NotImplementedError: the model is not supported.
        RuntimeError: the process that compiles failed.
        TypeError: ``calls`` is neither a path nor recorded calls, or ``model`` is not a path.
        ValueError: ``device`` is not an NVIDIA GPU of this machine, the file does not hold calls, the model's
            config is wrong, ``purpose`` is wrong, or not exactly one of ``calls`` and ``model`` is given.

    Examples:
        >>> if torch.cuda.is_available():
        ...     flashtile.warmup("calls.json")
        ...     flashtile.warmup(model="Llama-3-8B", purpose="training")
    """
    if (calls is None) == (model is None):
        raise ValueError("warmup() must have either calls or model")
    if purpose != "both" and model is None:
        raise ValueError(f"purpose must be 'both' without model, got {purpose!r}")
    check_choice("purpose", purpose, PURPOSES)
    given: Sources
    if model is not None:
        given = partial(model_calls, read_model(model), purpose)
    elif isinstance(calls, (str, os.PathLike)):
        given = read_calls(calls)
    else:
        given = list(calls) if isinstance(calls, Iterable) else []
        if not isinstance(calls, Iterable) or not all(isinstance(call, Call) for call in given):
            raise TypeError(f"calls must be a path or recorded calls, got {type(calls).__name__}")
    found = torch.device(device or "cuda")
    if found.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        raise ValueError(f"device must be an NVIDIA GPU of this machine, got {found}")
    return compile_in_process(given, target_of(found), workers)
