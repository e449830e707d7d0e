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

ENGINE = {
    "num_requests_running": ("gauge", "Sequences that have memory.", "running"),
    "num_requests_waiting": ("gauge", "Sequences that wait for memory.", "waiting"),
    "kv_cache_usage_perc": ("gauge", "Share of the blocks in use, from 0 to 1.", "cache_usage"),
    "num_preemptions_total": ("counter", "Sequences that lost their memory for a while.", "num_preemptions"),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were computed.", "prompt_tokens"),
    "generation_tokens_total": ("counter", "Tokens of answers.", "generation_tokens"),
    "prefix_cache_queries_total": ("counter", "Prompt tokens looked up in the cache.", "prefix_queries"),
    "prefix_cache_hits_total": ("counter", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    "kv_reads_total": ("counter", "Tokens of the cache to read, if each sequence read its own.", "kv_reads"),
    "kv_reads_saved_total": ("counter", "Tokens of these that a group read once.", "kv_reads_saved"),
}
"""Kind, help text and field of EngineStats of each of the engine's metrics."""

HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Time between two tokens; without streaming, an answer's mean.",
    "request_time_per_output_token_seconds": "Mean time per token of a request after its first.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
    "request_queue_time_seconds": "From the arrival of a request to the first step that computes it.",
    "request_prefill_time_seconds": "From the first step of a request to its first token.",
    "request_decode_time_seconds": "From the first token of a request to its end.",
    "iteration_tokens_total": "Tokens that a step of the engine computes.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of all answers of a request.",
}
"""Help texts of the histograms, of seconds or of tokens."""


class Histogram:
    """Counts of values by upper bound. One thread may observe while others read."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0


class Metrics:
    """Counters and histograms of a server, named without the prefix ``vllm:``."""

    def __init__(self, model_name: str):
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.label = f'model_name="{escaped}"'
        self.histograms = {
            name: Histogram(SECONDS if name.endswith("seconds") else TOKENS) for name in HISTOGRAMS
        }
        self.finished = dict.fromkeys(REASONS, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        histogram = self.histograms[name]
        histogram.counts[bisect_left(histogram.bounds, value)] += times
        histogram.sum += value * times

    def request_finished(self, output: RequestOutput, generated: int, streamed: bool) -> None:
        """Count a finished request whose answers have ``generated`` tokens.

        If it was streamed, the times between its tokens were already observed.
        """
        reasons = {one.finish_reason for one in output.outputs}
        self.finished[next((reason for reason in reversed(REASONS) if reason in reasons), "stop")] += 1
        self.observe("request_prompt_tokens", len(output.prompt_token_ids))
        self.observe("request_generation_tokens", generated)
        times = output.metrics
        intervals = {
            "e2e_request_latency_seconds": (times.arrival_time, times.finished_time),
            "request_queue_time_seconds": (times.arrival_time, times.first_scheduled_time),
            "time_to_first_token_seconds": (times.arrival_time, times.first_token_time),
            "request_prefill_time_seconds": (times.first_scheduled_time, times.first_token_time),
            "request_decode_time_seconds": (times.first_token_time, times.finished_time),
        }
        for name, (begin, end) in intervals.items():
            if begin is not None and end is not None:
                self.observe(name, end - begin)
        steps = generated // max(1, len(output.outputs)) - 1
        if steps > 0 and times.first_token_time is not None and times.finished_time is not None:
            mean = (times.finished_time - times.first_token_time) / steps
            self.observe("request_time_per_output_token_seconds", mean)
            if not streamed:
                self.observe("inter_token_latency_seconds", mean, steps)

    def text(self, stats: EngineStats) -> str:
        """Return all metrics, including the engine's statistics, as text."""
        return "".join(f"{line}\n" for line in self._lines(stats))

    def _lines(self, stats: EngineStats) -> Iterator[str]:
        for name, (kind, text, field) in ENGINE.items():
            yield from _head(name, text, kind)
            yield f"vllm:{name}{{{self.label}}} {_number(getattr(stats, field))}"
        yield from _head("request_success_total", "Requests that ended, by reason.", "counter")
        for reason, count in self.finished.items():
            yield f'vllm:request_success_total{{{self.label},finished_reason="{reason}"}} {count}'
        for name, histogram in self.histograms.items():
            yield from _head(name, HISTOGRAMS[name], "histogram")
            counts, total = list(histogram.counts), 0
            for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
                total += count
                yield f'vllm:{name}_bucket{{{self.label},le="{_number(bound)}"}} {total}'
            yield f"vllm:{name}_sum{{{self.label}}} {_number(histogram.sum)}"
            yield f"vllm:{name}_count{{{self.label}}} {total}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"


def _number(value: float) -> str:
    return "+Inf" if math.isinf(value) else f"{value:.10g}"
