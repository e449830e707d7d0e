"""Parameters of a request: how tokens are chosen, when answers end, and what outputs contain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from flashtile.checks.arguments import as_int_within, is_choice
from flashtile.checks.conversions import as_float, check_flag
from flashtile.checks.vllm_arguments import (
    BEAM_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    STRUCTURE_ARGUMENTS,
    takes_also,
)

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""(tokens of the answer so far, logits (vocab_size,) float32) -> logits, possibly changed in place."""

MIN_TEMPERATURE = 1e-30
MAX_N = 1024
MAX_STOPS = 64
MAX_LISTED = 2**16
"""Largest number of entries of logit_bias, allowed_token_ids and stop_token_ids."""
STRUCTURES = {
    "json": "a JSON schema, which is a dict or its text,",
    "json_object": "True",
    "regex": "a string that is not empty",
    "choice": "a list of strings that is not empty",
    "grammar": "a string that is not empty",
}
"""Keys of structured_outputs, with descriptions of their values for errors."""
REASONING = ("think", "begun", "harmony")
"""Forms of reasoning before an answer's content."""


class RequestOutputKind(Enum):
    """Contents of a request's outputs: the answer so far, only its new part, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@takes_also(SAMPLING_ARGUMENTS)
@dataclass
class SamplingParams:
    """How an answer is sampled, when it ends and what its outputs contain, with vLLM's names and meanings.

    Args:
        n: number of answers to the prompt. The answers share the memory of the prompt's keys and values.
        presence_penalty: from -2 to 2, subtracted from the logit of each token that the answer contains.
        frequency_penalty: from -2 to 2, subtracted from a token's logit for each time that the answer
            contains it.
        repetition_penalty: above 0. Logits of tokens in prompt or answer are divided by it if positive, and
            multiplied by it if negative. 1: no penalty.
        temperature: divisor of the logits. 0: the likeliest token is chosen.
        top_p: sample from the smallest set of likeliest tokens that has this probability.
        top_k: sample from the ``top_k`` likeliest tokens; 0 or -1: from all.
        min_p: drop tokens below this share of the likeliest token's probability.
        seed: makes the answer repeatable, independent of the rest of the batch. None or -1: the draws depend
            on the engine's seed and the request's number.
        stop: a text or texts that end an answer. The answer's text is cut before the stop text unless
            ``include_stop_str_in_output``.
        stop_token_ids: tokens that end an answer, in addition to the model's own.
        ignore_eos: continue after the model's end token.
        max_tokens: maximum number of tokens of an answer. None: only ``max_model_len`` limits it.
        min_tokens: minimum number of tokens of an answer. Until then, end tokens are not chosen and stop
            texts are ignored.
        logprobs: number of likeliest tokens whose log-probabilities are returned at each position, in
            addition to the chosen token's; -1: the whole vocabulary. Log-probabilities come from the model's
            logits before temperature, penalties and filters.
        prompt_logprobs: as ``logprobs``, for the prompt's tokens.
        logprob_token_ids: not supported; use ``logprobs``.
        detokenize: make the answer's ``text``. False leaves it empty.
        skip_special_tokens: leave the tokenizer's special tokens out of the text.
        include_stop_str_in_output: keep the stop text or end token in the answer's text.
        output_kind: contents of the request's outputs (:class:`RequestOutputKind`).
        structured_outputs: what the answer's text must match, a dict with one key: ``{"json": schema}`` (a
            dict or its text), ``{"json_object": True}``, ``{"regex": text}``, ``{"choice": [text, ...]}`` or
            ``{"grammar": text}`` (llguidance's Lark). The answer ends when no continuation would match. End
            tokens are chosen only where the text matches, also with ``ignore_eos``. A second key,
            ``reasoning``, allows reasoning before the structure: "think" (``<think>...</think>`` or
            nothing), "begun" (the prompt ends with ``<think>``) or "harmony" (gpt-oss). Needs llguidance.
        logit_bias: dict from a token to the number added to its logit, from -100 to 100.
        allowed_token_ids: the only tokens that may be chosen.
        bad_words: not supported; forbid tokens with ``logit_bias`` or a logits processor.
        logits_processors: functions of the answer's tokens so far and the logits. They run on the host, one
            request at a time, so they slow the engine down.
        extra_args: not supported.
        reasoning: form of reasoning before the content, as in ``structured_outputs``. ``stop`` is looked for
            in the content only. Its markers must be in the text, so ``skip_special_tokens`` may have to be
            False.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is invalid or not supported.

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
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[LogitsProcessor] | None = None
    extra_args: dict[str, Any] | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        self.n = as_int_within("n", self.n, 1, MAX_N)
        self.presence_penalty = _float("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _float("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = _float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        self.temperature = _temperature(self.temperature)
        self.top_p = _float("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, got 0")
        self.top_k = max(0, as_int_within("top_k", self.top_k, -1, 2**31 - 1))
        self.min_p = _float("min_p", self.min_p, 0, 1)
        self.stop = _strings("stop", self.stop)
        self.stop_token_ids = _tokens("stop_token_ids", self.stop_token_ids)
        for name, least, most in (
            ("seed", -(2**63), 2**63 - 1), ("max_tokens", 1, 2**30),
            ("logprobs", -1, 2**20), ("prompt_logprobs", -1, 2**20),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                setattr(self, name, as_int_within(name, getattr(self, name), least, most))
        self.seed = None if self.seed == -1 else self.seed
        self.min_tokens = as_int_within("min_tokens", self.min_tokens, 0, self.max_tokens or 2**30)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _tokens("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty, got []")
        self.logit_bias = _bias(self.logit_bias)
        if self.structured_outputs is not None:
            self.structured_outputs = _structure(self.structured_outputs)
        for name in ("bad_words", "extra_args", "logprob_token_ids"):
            if getattr(self, name):
                raise NotImplementedError(f"{name} is not supported, got {getattr(self, name)!r:.60}")
        if self.spaces_between_special_tokens is not True:
            got = f"{self.spaces_between_special_tokens!r:.60}"
            raise NotImplementedError(f"spaces_between_special_tokens must be True, got {got}")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r:.60}")
        if not self.detokenize and self.stop:
            raise ValueError(f"stop must be empty with detokenize=False, got {self.stop!r:.60}")
        if self.reasoning is not None and not is_choice(self.reasoning, REASONING):
            raise ValueError(f"reasoning must be one of {', '.join(REASONING)}, got {self.reasoning!r:.60}")
        processors = self.logits_processors or []
        if not isinstance(processors, Sequence) or not all(callable(one) for one in processors):
            raise TypeError(f"logits_processors must be a list of functions, got {processors!r:.60}")
        self.logits_processors = list(processors)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a random draw."""
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
        """Whether the host must know the previous tokens, for logits processors or structured outputs."""
        return bool(self.logits_processors) or self.structured_outputs is not None


@takes_also(STRUCTURE_ARGUMENTS)
class StructuredOutputsParams(dict[str, Any]):
    """``structured_outputs`` of :class:`SamplingParams`, as vLLM names it. A dict with the same keys will do.

    Give one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``.

    Examples:
        >>> from flashtile.engine import SamplingParams, StructuredOutputsParams
        >>> params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
        >>> params.structured_outputs
        {'choice': ['yes', 'no']}
    """

    def __init__(
        self,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
    ):
        given = {
            "json": json,
            "regex": regex,
            "choice": choice,
            "grammar": grammar,
            "json_object": json_object,
        }
        super().__init__({name: value for name, value in given.items() if value is not None})


@takes_also(BEAM_ARGUMENTS)
@dataclass
class BeamSearchParams:
    """Parameters of beam search, with vLLM's names.

    Args:
        beam_width: number of beams kept at every step, and of answers returned.
        max_tokens, ignore_eos, stop_token_ids: as for :class:`SamplingParams`.
        temperature: divisor of the logits before log-probabilities are summed; 0 means 1.
        length_penalty: answers are ranked by log-probability / length ** length_penalty, where length is the
            number of their tokens.
        include_stop_str_in_output: keep the end token in ``token_ids`` and ``text``.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beam_width = as_int_within("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = as_int_within("max_tokens", self.max_tokens, 1, 2**30)
        self.temperature = _temperature(self.temperature)
        self.length_penalty = _float("length_penalty", self.length_penalty, -100, 100)
        self.stop_token_ids = _tokens("stop_token_ids", self.stop_token_ids)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))

    def sampling(self) -> SamplingParams:
        """Return greedy parameters with ``n=beam_width``, because beam search uses no drawn token."""
        return SamplingParams(
            n=self.beam_width, temperature=0, stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip


def _temperature(value: Any) -> float:
    """Validate a temperature, and raise it to ``MIN_TEMPERATURE`` if it is smaller and not 0.

    Division of logits by a smaller temperature could overflow.
    """
    found = _float("temperature", value, 0, 1e6)
    return max(found, MIN_TEMPERATURE) if found else 0.0


def _float(name: str, value: Any, least: float, most: float) -> float:
    number: float = as_float(name, value, "a number")
    if not least <= number <= most:  # this form also refuses NaN
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return number


def _strings(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r:.60}")
    if len(found) > MAX_STOPS or not all(found):
        raise ValueError(f"{name} must be at most {MAX_STOPS} strings, none of them empty, got {found!r:.60}")
    return list(found)


def _tokens(name: str, value: Any) -> list[int]:
    found = [] if value is None else value
    if not isinstance(found, (list, tuple, set)):
        raise TypeError(f"{name} must be a list of tokens, got {value!r:.60}")
    if len(found) > MAX_LISTED:
        raise ValueError(f"{name} must be at most {MAX_LISTED} tokens, got {len(found)}")
    return [as_int_within(name, token, 0, 2**31 - 1) for token in found]


def _structure(value: Any) -> dict[str, Any]:
    """Validate ``structured_outputs`` and return it as a new dict. Values of None count as absent."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    given = {kind: one for kind, one in pairs if one is not None}
    reasoning = given.pop("reasoning", None)
    if reasoning is not None and not is_choice(reasoning, REASONING):
        allowed = ", ".join(REASONING)
        raise ValueError(f"structured_outputs must have one of {allowed} as reasoning, got {reasoning!r:.60}")
    if len(given) != 1 or not given.keys() <= STRUCTURES.keys():
        allowed = ", ".join(STRUCTURES)
        raise ValueError(f"structured_outputs must be a dict with one of {allowed}, got {value!r:.60}")
    ((kind, one),) = given.items()
    if kind == "json":
        fits = _is_schema(one)
    elif kind == "json_object":
        fits = one is True
    elif kind == "choice":
        fits = isinstance(one, (list, tuple)) and bool(one) and all(isinstance(text, str) for text in one)
    else:
        fits = isinstance(one, str) and bool(one)
    if not fits:
        raise TypeError(f"structured_outputs must have {STRUCTURES[kind]} as {kind}, got {one!r:.60}")
    return given if reasoning is None else {**given, "reasoning": reasoning}


def _is_schema(value: Any) -> bool:
    """Whether a value is a JSON object, as a dict or as text."""
    try:
        return isinstance(json.loads(value if isinstance(value, str) else json.dumps(value)), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _bias(value: Any) -> dict[int, float] | None:
    """Validate ``logit_bias`` and convert its keys to integers, because JSON has only strings as keys."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LISTED:
        raise TypeError(f"logit_bias must be a dict of at most {MAX_LISTED} tokens, got {value!r:.60}")
    bias = {}
    for token, amount in value.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 12:
            token = int(token)
        bias[as_int_within("logit_bias", token, 0, 2**31 - 1)] = _float("logit_bias", amount, -100, 100)
    return bias or None
