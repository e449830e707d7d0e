"""What a request asks for: how its tokens are chosen, when it ends, and what comes back with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from flashtile.checks.conversions import as_int, check_flag

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""(tokens of the answer so far, logits (vocab_size,) float32) -> logits, which may be the same, changed."""

LEAST_TEMPERATURE = 1e-30
MAX_N = 1024
MAX_STOPS = 64
MAX_LISTED = 2**16
"""Entries of logit_bias, allowed_token_ids, stop_token_ids and bad_words."""


class RequestOutputKind(Enum):
    """What each output of a request that is not finished holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """vLLM's names and meanings.

    Args:
        n: answers to the prompt; they share the memory of the prompt's keys and values.
        presence_penalty, frequency_penalty: from -2 to 2, subtracted from the logits of tokens that the
            answer has, once or as often as it has them.
        repetition_penalty: above 0; logits of tokens in prompt or answer are divided by it where they are
            positive, multiplied where negative. 1 is none.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: only the likeliest tokens, as many as needed for this much probability.
        top_k: only the likeliest so many; 0 or -1 is all.
        min_p: only tokens with at least this share of the likeliest one's probability.
        seed: makes the answer repeatable, whatever else is computed beside it. None or -1: each request
            differs, repeatable by the seed of the engine and the order of requests alone.
        stop: texts that end an answer; it is cut before them unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end it, beside the model's own.
        ignore_eos: go on after the model's end token.
        max_tokens: of an answer; None: as many as the model's length allows.
        min_tokens: before which neither end tokens are chosen nor stop texts looked for.
        logprobs: so many likeliest tokens' log-probabilities at each position, and the chosen one's; -1 is
            the whole vocabulary. By the model's distribution, before temperature and the like.
        prompt_logprobs: the same for the prompt's tokens.
        logprob_token_ids: refused: ask for ``logprobs`` instead.
        detokenize: False: ``text`` stays empty.
        skip_special_tokens: leave the tokenizer's special tokens out of the text.
        include_stop_str_in_output: leave the text that ended the answer in it.
        output_kind: what outputs hold before the last one.
        logit_bias: by token, added to its logit, from -100 to 100.
        allowed_token_ids: only these are chosen.
        bad_words: refused; forbid tokens with ``logit_bias`` or a logits processor.
        logits_processors: functions of an answer's tokens so far and the logits. They run on the host, one
            request at a time, and cost what they cost.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> from flashtile import SamplingParams
        >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100, seed=1).greedy
        False
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[LogitsProcessor] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.n = _int("n", self.n, 1, MAX_N)
        self.presence_penalty = _float("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _float("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = _float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        self.temperature = _temperature(self.temperature)
        self.top_p = _float("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, got 0")
        self.top_k = max(0, _int("top_k", self.top_k, -1, 2**31 - 1))
        self.min_p = _float("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = _int("seed", self.seed, -(2**63), 2**63 - 1)
            if self.seed == -1:
                self.seed = None
        self.stop = _strings("stop", self.stop)
        self.stop_token_ids = _tokens("stop_token_ids", self.stop_token_ids)
        if self.max_tokens is not None:
            self.max_tokens = _int("max_tokens", self.max_tokens, 1, 2**30)
        self.min_tokens = _int("min_tokens", self.min_tokens, 0, self.max_tokens or 2**30)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, _int(name, getattr(self, name), -1, 2**20))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _tokens("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty: no token could be chosen")
        self.logit_bias = _bias(self.logit_bias)
        self._refuse_what_is_not_served()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r:.60}")
        if not self.detokenize and self.stop:
            raise ValueError("stop must be empty with detokenize=False: stop texts are found in the text")
        processors = self.logits_processors or []
        if not isinstance(processors, Sequence) or not all(callable(one) for one in processors):
            raise TypeError("logits_processors must be a list of functions")
        self.logits_processors = list(processors)

    def _refuse_what_is_not_served(self) -> None:
        for name in ("structured_outputs", "bad_words", "extra_args", "logprob_token_ids"):
            if getattr(self, name):
                raise NotImplementedError(f"{name} is not supported, got {getattr(self, name)!r:.60}")
        if self.spaces_between_special_tokens is not True:
            raise NotImplementedError("spaces_between_special_tokens must be True")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, no draw made."""
        return self.temperature == 0

    @property
    def stops(self) -> list[str]:
        """``stop`` as a list."""
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def reads_tokens(self) -> bool:
        """Whether the next token's logits depend on the tokens before it by more than the model."""
        return self.penalises or bool(self.logits_processors)


@dataclass
class BeamSearchParams:
    """Keep the ``beam_width`` likeliest texts at every step; vLLM's names.

    Args:
        beam_width: texts that are kept, and returned.
        max_tokens: of a text.
        ignore_eos: go on after the model's end token.
        temperature: logits are divided by it before their log-probabilities are summed; 0 is 1.
        length_penalty: a text is ranked by its log-probability over its length to this power.
        include_stop_str_in_output: keep the end token in ``token_ids`` and ``text``.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beam_width = _int("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = _int("max_tokens", self.max_tokens, 1, 2**30)
        self.temperature = _temperature(self.temperature)
        self.length_penalty = _float("length_penalty", self.length_penalty, -100, 100)
        self.stop_token_ids = _tokens("stop_token_ids", self.stop_token_ids)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))


def _temperature(value: Any) -> float:
    """0, or enough that logits divided by it stay finite in float32."""
    found = _float("temperature", value, 0, 1e6)
    return max(found, LEAST_TEMPERATURE) if found else 0.0


def _int(name: str, value: Any, least: int, most: int) -> int:
    number: int = as_int(name, value)
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {number}")
    return number


def _float(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r:.60}")
    if math.isnan(value) or not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return float(value)


def _strings(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r:.60}")
    if len(found) > MAX_STOPS or not all(found):
        raise ValueError(f"{name} must be at most {MAX_STOPS} strings, none of them empty")
    return list(found)


def _tokens(name: str, value: Any) -> list[int]:
    found = [] if value is None else value
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, (list, tuple, set)):
        raise TypeError(f"{name} must be a list of tokens, got {value!r:.60}")
    if len(found) > MAX_LISTED:
        raise ValueError(f"{name} must be at most {MAX_LISTED} tokens, got {len(found)}")
    return [_int(name, token, 0, 2**31 - 1) for token in found]


def _bias(value: Any) -> dict[int, float] | None:
    """With keys as numbers: JSON knows strings only."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LISTED:
        raise TypeError(f"logit_bias must be a dict of at most {MAX_LISTED} tokens, got {value!r:.60}")
    bias = {}
    for token, amount in value.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 12:
            token = int(token)
        bias[_int("logit_bias", token, 0, 2**31 - 1)] = _float("logit_bias", amount, -100, 100)
    return bias or None
