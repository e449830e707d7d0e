"""Prometheus metrics under vLLM's names, in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

from flashtile.engine.core import EngineStats
from flashtile.engine.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))
TOKENS = tuple(float(2**power) for power in range(0, 18))

REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of values by upper bound. One thread may observe while others read."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """Counters and histograms of a server.

    Attributes:
        histograms: (help text, histogram) by name without the prefix ``vllm:``.
        finished: number of requests by finish reason.
    """

    def __init__(self, model_name: str):
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.label = f'model_name="{escaped}"'
        seconds = {
            "time_to_first_token_seconds": "From the arrival of a request to its first token.",
            "inter_token_latency_seconds": "Time between two tokens; without streaming, an answer's mean.",
            "request_time_per_output_token_seconds": "Mean time per token of a request after its first.",
            "e2e_request_latency_seconds": "From the arrival of a request to its end.",
            "request_queue_time_seconds": "From the arrival of a request to the first step that computes it.",
            "request_prefill_time_seconds": "From the first step of a request to its first token.",
            "request_decode_time_seconds": "From the first token of a request to its end.",
        }
        tokens = {
            "iteration_tokens_total": "Tokens that a step of the engine computes.",
            "request_prompt_tokens": "Tokens of a prompt.",
            "request_generation_tokens": "Tokens of all answers of a request.",
        }
        self.histograms = {name: (text, Histogram(SECONDS)) for name, text in seconds.items()}
        self.histograms |= {name: (text, Histogram(TOKENS)) for name, text in tokens.items()}
        self.finished = dict.fromkeys(REASONS, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name][1].observe(value, times)

    def request_finished(self, output: RequestOutput, generated: int, streamed: bool) -> None:
        """Count a finished request.

        Args:
            generated: number of tokens of all answers of the request.
            streamed: whether the times between the request's tokens were already observed.
        """
        reasons = {one.finish_reason for one in output.outputs}
        self.finished[next((reason for reason in reversed(REASONS) if reason in reasons), "stop")] += 1
        times = output.metrics
        self.observe("request_prompt_tokens", len(output.prompt_token_ids))
        self.observe("request_generation_tokens", generated)
        if times.finished_time is None:
            return
        self.observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if times.first_scheduled_time is None:
            return
        self.observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None:
            return
        decoding = times.finished_time - times.first_token_time
        self.observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
        self.observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        self.observe("request_decode_time_seconds", decoding)
        steps = max((generated // max(1, len(output.outputs))) - 1, 0)
        if steps:
            self.observe("request_time_per_output_token_seconds", decoding / steps)
            if not streamed:
                self.observe("inter_token_latency_seconds", decoding / steps, steps)

    def text(self, stats: EngineStats) -> str:
        """Return all metrics, including the engine's statistics, as text."""
        return "\n".join([*self._engine(stats), *self._requests(), *self._histograms(), ""])

    def _engine(self, stats: EngineStats) -> Iterator[str]:
        gauges = {
            "num_requests_running": ("Sequences that have memory.", stats.running),
            "num_requests_waiting": ("Sequences that wait for memory.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the blocks in use, from 0 to 1.", stats.cache_usage),
        }
        counters = {
            "num_preemptions_total": ("Sequences that lost their memory for a while.", stats.num_preemptions),
            "prompt_tokens_total": ("Tokens of prompts that were computed.", stats.prompt_tokens),
            "generation_tokens_total": ("Tokens of answers.", stats.generation_tokens),
            "prefix_cache_queries_total": ("Prompt tokens looked up in the cache.", stats.prefix_queries),
            "prefix_cache_hits_total": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
        }
        for kind, numbers in (("gauge", gauges), ("counter", counters)):
            for name, (text, value) in numbers.items():
                yield from self._head(name, text, kind)
                yield f"vllm:{name}{{{self.label}}} {_number(value)}"

    def _requests(self) -> Iterator[str]:
        yield from self._head("request_success_total", "Requests that ended, by reason.", "counter")
        for reason, count in self.finished.items():
            yield f'vllm:request_success_total{{{self.label},finished_reason="{reason}"}} {count}'

    def _histograms(self) -> Iterator[str]:
        for name, (text, histogram) in self.histograms.items():
            yield from self._head(name, text, "histogram")
            counts, total = list(histogram.counts), 0
            for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
                total += count
                yield f'vllm:{name}_bucket{{{self.label},le="{_number(bound)}"}} {total}'
            yield f"vllm:{name}_sum{{{self.label}}} {_number(histogram.sum)}"
            yield f"vllm:{name}_count{{{self.label}}} {total}"

    def _head(self, name: str, text: str, kind: str) -> Iterator[str]:
        yield f"# HELP vllm:{name} {text}"
        yield f"# TYPE vllm:{name} {kind}"


def _number(value: float) -> str:
    return "+Inf" if math.isinf(value) else f"{value:.10g}"
