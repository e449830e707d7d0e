"""Inference engine: runs models from Hugging Face folders on the library's kernels and paged KV cache."""

from flashtile.engine.async_llm import AsyncLLM, EngineDeadError
from flashtile.engine.config import ConfigError, ModelConfig
from flashtile.engine.core import Engine, EngineStats
from flashtile.engine.llm import LLM
from flashtile.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from flashtile.engine.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "Logprob",
    "ModelConfig",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
