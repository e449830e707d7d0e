"""Serving: models from Hugging Face folders, end to end over the library's kernels and pages."""

from flashtile.engine.async_llm import AsyncLLM, EngineDeadError
from flashtile.engine.config import ConfigError, ModelConfig
from flashtile.engine.core import Engine, EngineStats
from flashtile.engine.llm import LLM
from flashtile.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from flashtile.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

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
]
