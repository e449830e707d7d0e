"""The engine: accepts requests, computes one step at a time, and returns answers.

While a step runs on the GPU, the next one is scheduled and launched. Then the tokens of the running step are
read and appended to their answers. Beam search, structured outputs and logits processors need the last token
on the host. If a request uses any of them, the tokens are read before the next step is scheduled.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtile.checks.arguments import as_int_within, is_choice
from flashtile.checks.conversions import as_int, check_flag
from flashtile.engine.beam import BeamSearch
from flashtile.engine.config import model_folder
from flashtile.engine.detokenizer import Detokenizer
from flashtile.engine.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from flashtile.engine.request import NOT_ERRORS, Request, Sequence, State
from flashtile.engine.runner import KV_CACHE, LOGPROBS_MODES, NOT_FINITE, WEIGHTS, InFlight, Runner
from flashtile.engine.sampler import Scores, stream_seed
from flashtile.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from flashtile.engine.scheduler import Scheduler, SchedulerOutput
from flashtile.engine.speculation import DraftModel, PromptLookup, accepted_path
from flashtile.engine.structured import MAX_SECONDS, NOT_CONTINUED, Structures, error_of
from flashtile.engine.tokenizer import Tokenizer
from flashtile.engine.weights import OWN_HEAD, given_weights, has_own_head, open_weights

Prompt = str | list[int] | Mapping[str, Any]
"""A text, its tokens, or ``{"prompt": text}`` or ``{"prompt_token_ids": tokens}``."""
NamedTensors = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A folder with weights, or weights by name (:meth:`flashtile.engine.LLM.update_weights`)."""

logger = logging.getLogger("flashtile.engine")


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine: its present state, and totals since its start.

    Attributes:
        running, waiting: number of sequences that have blocks of the cache, and of sequences that have none.
        cache_usage: share of the cache's blocks that sequences use, from 0 to 1.
        num_preemptions: total number of preemptions.
        prompt_tokens, generation_tokens: total number of computed prompt tokens, and of generated tokens.
        prefix_queries, prefix_hits: total number of tokens looked up in the prefix cache, and found there.
        kv_reads, kv_reads_saved: with ``cascade_attention``, total number of tokens whose keys and values all
            layers would read if each sequence read its own, and the number of these that were not read
            because others of a group read them.
    """

    running: int
    waiting: int
    cache_usage: float
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    kv_reads: int = 0
    kv_reads_saved: int = 0


class Engine:
    """Queues, computes and aborts requests. Not thread-safe; :class:`flashtile.engine.AsyncLLM` is.

    Args:
        runner, scheduler: compute the steps, and choose their sequences.
        tokenizer: the model's tokenizer. None: prompts are tokens, and answers have no text.
        seed: seed of requests without a seed of their own.
        overlap: launch a step before the results of the previous one are read.
        speculator: guesses the next tokens; None: no speculation. With a speculator, a step's results are
            read before the next step is scheduled.

    Attributes:
        on_change: called for each method call that changes the engine, with the method's name and the
            positional and keyword arguments. With these, other processes repeat the call
            (:func:`flashtile.engine.parallel.repeat_changes`).
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        overlap: bool = True,
        speculator: PromptLookup | DraftModel | None = None,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.config, self.max_model_len = runner.model.config, scheduler.manager.max_seqlen
        self.seed, self.overlap = seed, overlap
        self.speculator, self.num_guessed_tokens = speculator, 0
        self.requests: dict[str, Request] = {}
        self.last_schedule = SchedulerOutput()
        self.on_change: Callable[[str, tuple[Any, ...], dict[str, Any]], None] = lambda *change: None
        self._in_flight: InFlight | None = None
        self._num_requests = 0
        self._touched: dict[Request, None] = {}  # requests with new results, in order
        self._beams: dict[Request, BeamSearch] = {}
        self._prompt_tokens = self._generation_tokens = 0
        ends = tokenizer.eos_token_ids if tokenizer else ()
        self.eos_token_ids = frozenset((*self.config.eos_token_ids, *ends))
        # The first process tries a structure for all.
        self.structures = Structures(
            tokenizer, self.config.vocab_size, self.eos_token_ids, trusting=runner.ranks.rank > 0
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        name: str = "prompt",
    ) -> Request:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: a text, its tokens, or a dict with ``prompt`` or ``prompt_token_ids``.
            params: sampling or beam search parameters.
            priority: lower values are scheduled first.
            cache_salt: only requests with the same salt share blocks through the prefix cache.
            name: what errors call the prompt.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument is invalid or not supported. Nothing is
                queued then.
        """
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a string that is not empty, got {request_id!r:.60}")
        if request_id in self.requests:
            raise ValueError(f"request_id must be new, but an unfinished request has {request_id!r:.60}")
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        self._check_awake("requests")
        if not self.runner.has_weights:
            raise ValueError(
                "the engine must have weights for requests, but sleep(level=2) or an update that failed left "
                "it without: call update_weights first"
            )
        text, tokens = self.tokens_of(prompt, name)
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise ValueError(
                f"{name} must be shorter than max_model_len={self.max_model_len} tokens, "
                f"the model's maximum context length, got {len(tokens)}"
            )
        beam = params if isinstance(params, BeamSearchParams) else None
        sampling = params.sampling() if isinstance(params, BeamSearchParams) else params
        self._check_tokens(sampling)
        if beam is not None and 4 * beam.beam_width > self.config.vocab_size:
            raise ValueError(
                f"beam_width must be at most a quarter of vocab_size={self.config.vocab_size}, "
                f"got {beam.beam_width}"
            )
        number, ends = self._num_requests, frozenset(sampling.stop_token_ids or ())
        structure, seed = sampling.structured_outputs, sampling.seed
        # The first process has compiled the structure in time, so the others must not refuse the request.
        seconds = None if self.runner.ranks.rank else MAX_SECONDS
        matchers = None if structure is None else self.structures.copies(structure, sampling.n, seconds)
        request = Request(
            request_id, number, text, tokens, sampling, beam=beam,
            max_outputs=min(room, room if params.max_tokens is None else params.max_tokens),
            ends=ends if params.ignore_eos and matchers is None else ends | self.eos_token_ids,
            seed=stream_seed(self.seed, number) if seed is None else seed,
            priority=as_int("priority", priority),
            salt=b"" if cache_salt is None else cache_salt.encode(),
            matchers=matchers,
        )  # fmt: skip
        if sampling.prompt_logprobs is not None:
            request.prompt_logprobs = self._flat_logprobs(missing=1)
        self.scheduler.add(request)
        options = {"priority": priority, "cache_salt": cache_salt}
        try:
            self.on_change("add_request", (request_id, {"prompt_token_ids": tokens}, params), options)
        except BaseException:  # for example, a logits processor cannot be pickled
            self._end(request, "error")
            raise
        self._num_requests += 1
        self.requests[request_id] = request
        if beam is not None:
            self._beams[request] = BeamSearch(request, beam)
        return request

    def compile_structure(self, structure: dict[str, Any], size: int) -> None:
        """Start to compile ``structured_outputs`` of later requests, in all processes of the engine.

        ``size`` is the number of bytes that this took in a trial.
        """
        self.structures.compile(structure, size)
        self.on_change("compile_structure", (structure, size), {})

    def tokens_of(self, prompt: Prompt, name: str = "prompt") -> tuple[str | None, list[int]]:
        """Validate a prompt and return its (text, tokens). The text is None if the prompt has only tokens.

        Errors call the prompt ``name``.
        """
        text: Any = None
        name_of_tokens = name
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown:
                raise NotImplementedError(
                    f"{name} must be a dict with the keys prompt or prompt_token_ids, got "
                    f"{sorted(map(str, unknown))}"
                )
            text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
            given = text if tokens is None else tokens
            if not (text is None or isinstance(text, str)) or isinstance(tokens, str):
                raise TypeError(
                    f"{name} must have a string as prompt and a list of tokens as prompt_token_ids, "
                    f"got {type(text).__name__} and {type(tokens).__name__}"
                )
            prompt = given
            name_of_tokens = f"prompt_token_ids of {name}"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{name} must be a list of tokens without a tokenizer, got a string")
            text, prompt = prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"{name} must be a string or a list of tokens, got {type(prompt).__name__}")
        if set(map(type, prompt)) == {int}:  # fast path: as_int for each token would delay the answer
            found = list(prompt)
        else:
            found = [as_int(f"token {i} of {name_of_tokens}", token) for i, token in enumerate(prompt)]
        if not found:
            raise ValueError(f"{name} must have at least one token, got 0")
        if min(found) < 0 or max(found) >= self.config.vocab_size:
            wrong = min(found) if min(found) < 0 else max(found)
            place, last = f"token {found.index(wrong)} of {name_of_tokens}", self.config.vocab_size - 1
            raise ValueError(f"{place} must be from 0 to {last}, got {wrong}")
        return text, found

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or the results of a launched step have not been read yet."""
        return bool(self.requests) or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Launch the next step, if anything is scheduled, and read the results of the previous one.

        Return the outputs of all requests with new results, in the form of their ``output_kind``.
        """
        self.on_change("step", (), {})
        self._touched = {}
        waits = not self.overlap or self.speculator is not None
        if waits or any(request.reads_tokens for request in self.requests.values()):
            self._read()
        if self.speculator is not None:
            for sequence in self.scheduler.running:
                sequence.guesses = []
                sequence.guesses, sequence.parents = self.speculator.guess(sequence)
        schedule = self.scheduler.schedule()
        if not schedule.entries:
            self._read()
        launched = self._launch(schedule) if schedule.entries or schedule.moves else None
        self._read()
        self._in_flight = launched
        if not self.overlap:
            self._read()
        return [output for request in self._touched if (output := self._output(request)) is not None]

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and return their outputs so far. Unknown ids are ignored."""
        outputs = []
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.on_change("abort", (ids,), {})
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, "abort")
                output = self._output(request)
                assert output is not None
                outputs.append(output)
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> int:
        """Empty the prefix cache and return the number of blocks that it held.

        The argument is that of :meth:`flashtile.engine.LLM.reset_prefix_cache`.
        """
        check_flag("reset_running_requests", reset_running_requests)
        self.on_change("reset_prefix_cache", (reset_running_requests,), {})
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Replace all weights (:meth:`flashtile.engine.LLM.update_weights`)."""
        runner, model = self.runner, self.runner.model
        self._check_no_requests("update_weights")
        self._check_awake("update_weights", WEIGHTS)
        given = model.config, runner.device, model.embedding.dtype, model.ranks
        if isinstance(named_tensors, (str, Path)):
            folder = model_folder(named_tensors)
            weights = open_weights(folder, *given)
            if has_own_head(folder, model.config, model.embedding.dtype):
                raise ValueError(OWN_HEAD)
        else:
            weights = given_weights(named_tensors, *given, present=model.weights)
        model.check_e4m3(weights)
        self.on_change("update_weights", (named_tensors,), {})
        self.scheduler.manager.reset_prefix_cache()
        runner.has_weights = False  # until all are written
        model.update(weights)
        runner.has_weights = True

    def sleep(self, level: int = 1) -> None:
        """Free memory until :meth:`wake_up` (:meth:`flashtile.engine.LLM.sleep`)."""
        level = as_int_within("level", level, 1, 2)
        self._check_no_requests("sleep")
        self._check_awake("sleep")
        self.on_change("sleep", (level,), {})
        self.scheduler.manager.reset_prefix_cache()
        self.runner.sleep(keep_weights=level == 1)

    def wake_up(self, tags: Listing[str] | None = None) -> None:
        """Allocate the memory that :meth:`sleep` freed (:meth:`flashtile.engine.LLM.wake_up`)."""
        own = WEIGHTS, KV_CACHE
        chosen = own if tags is None else tags
        if not isinstance(chosen, (list, tuple)) or not all(is_choice(tag, own) for tag in chosen):
            raise ValueError(f"tags must be a list of {WEIGHTS!r} and {KV_CACHE!r} or None, got {tags!r:.60}")
        self.on_change("wake_up", (tags,), {})
        for tag in chosen:
            self.runner.wake_up(tag)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory that :meth:`sleep` freed is not allocated yet."""
        return bool(self.runner.asleep)

    def score_request(self, prompt: Prompt, name: str = "prompt") -> tuple[list[int], SamplingParams]:
        """Return the tokens to score, and the parameters of a request for all of them but the last.

        Errors call the prompt ``name``.

        The last token is the request's answer, which has no alternative: the prompt may then fill
        ``max_model_len``. :func:`scores` reads the request's output.
        """
        if self.runner.logprobs_mode != LOGPROBS_MODES[0]:
            got = self.runner.logprobs_mode
            raise ValueError(f"logprobs_mode must be {LOGPROBS_MODES[0]!r} for score, got {got!r}")
        _, tokens = self.tokens_of(prompt, name)
        if not 2 <= len(tokens) <= self.max_model_len:
            allowed = f"2 to max_model_len={self.max_model_len}"
            raise ValueError(f"{name} must have {allowed} tokens for score, got {len(tokens)}")
        return tokens, SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=0, detokenize=False,
            allowed_token_ids=tokens[-1:], output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def stats(self) -> EngineStats:
        """Return the present statistics."""
        scheduler, pool = self.scheduler, self.scheduler.manager.pool
        blocks, groups = pool.num_blocks - pool.null_blocks, scheduler.groups
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting), 1 - pool.available / blocks,
            scheduler.num_preemptions, self._prompt_tokens, self._generation_tokens,
            scheduler.prefix_queries, scheduler.prefix_hits,
            *(() if groups is None else (groups.num_read, groups.num_saved)),
        )  # fmt: skip

    def _check_awake(self, purpose: str, *tags: str) -> None:
        """Raise ValueError if memory with one of the tags is freed, by default with any tag."""
        freed = [tag for tag in tags or (WEIGHTS, KV_CACHE) if tag in self.runner.asleep]
        if freed:
            memory = " and ".join(freed)
            raise ValueError(
                f"the engine must be awake for {purpose}, but its memory of {memory} is freed: "
                "call wake_up first"
            )

    def _check_no_requests(self, method: str) -> None:
        # A step may be in flight, launched before the last token of an answer was read. It is of no more use.
        if self.requests:
            count = len(self.requests)
            raise ValueError(f"{method} must be called without unfinished requests, got {count} of them")

    def _check_tokens(self, params: SamplingParams) -> None:
        size = self.config.vocab_size
        if params.stops and self.tokenizer is None:
            raise ValueError(f"stop must be empty without a tokenizer, got {params.stops!r:.60}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise ValueError(f"{name} must be at most vocab_size={size}, got {getattr(params, name)}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            tokens = getattr(params, name)
            if tokens and max(tokens) >= size:
                raise ValueError(f"{name} must hold tokens below vocab_size={size}, got {max(tokens)}")

    def _launch(self, schedule: SchedulerOutput) -> InFlight | None:
        self.last_schedule = schedule
        now, size, answers = time.monotonic(), self.scheduler.manager.block_size, dict[Request, list[Any]]()
        for sequence, start, num_tokens, _, samples in schedule.entries:
            request, blocks = sequence.request, -(-(start + num_tokens) // size)
            if request.width > 1:
                answers.setdefault(request, []).append((sequence.block_sequence, blocks, len(samples)))
            if start < request.num_prompt:
                self._prompt_tokens += min(request.num_prompt - start, num_tokens)
                if request.metrics.first_scheduled_time is None:
                    request.metrics.first_scheduled_time = now
        for request, found in answers.items():
            if found != request.counted:  # to count the blocks of eight answers takes 40 us
                request.counted, request.num_blocks = found, self._count_blocks(request)
            request.metrics.blocks += request.num_blocks[0]
            request.metrics.unshared_blocks += request.num_blocks[1]
        try:
            return self.runner.launch(schedule)
        except NOT_ERRORS:
            raise
        except BaseException as error:
            if self.runner.ranks.world > 1:
                raise  # the other processes may have continued, so the engines no longer agree
            # It is unknown which blocks the failed step wrote, so no request may reuse cached ones.
            logger.exception("a step failed; its requests end with an error")
            self.scheduler.manager.reset_prefix_cache()
            taking_part = [*(entry.sequence for entry in schedule.entries), *schedule.swapped]
            for request in {sequence.request for sequence in taking_part}:
                self._fail(request, f"{type(error).__name__}: {error}")
            self.scheduler.manager.reset_prefix_cache()
            return None

    def _read(self) -> None:
        """Wait for the step in flight, if there is one, and apply its results."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        tokens = in_flight.wait()
        for sequence, first, found in in_flight.prompt_scores:
            request = sequence.request
            if request.finished:  # aborted while this step ran; another request may have its id by now
                continue
            if found.chosen.isnan().any():
                self._fail(request, NOT_FINITE)
            elif request.prompt_logprobs is not None and len(request.prompt_logprobs) == first:
                scored = sequence.tokens[first : first + len(found.chosen)]
                request.prompt_logprobs.add(scored, *(tensor.flatten().tolist() for tensor in found))
        i = 0
        while i < len(tokens):
            sequence = in_flight.samples[i]
            end = i + 1 + len(sequence.guesses)
            sequence.pending -= 1
            self._take_path(sequence, i, tokens[i:end], in_flight)
            i = end
            if sequence.guesses:
                self.scheduler.drop_guesses(sequence)

    def _take_path(self, sequence: Sequence, first: int, tokens: list[int], in_flight: InFlight) -> None:
        """Append the tokens that were drawn along the accepted path of a sequence's guesses (drafted tokens).

        Args:
            sequence: the sequence that the step computed.
            first: index of the sequence's first sample in ``in_flight``.
            tokens: the tokens drawn after its last token and after each guess.
            in_flight: the step, for its log-probabilities and errors.
        """
        request, begin, computed, nodes = sequence.request, len(sequence.tokens), 0, [0]
        if sequence.guesses:
            nodes = accepted_path(sequence.guesses, sequence.parents, tokens)
        for place, node in enumerate(nodes):
            if sequence.state is State.FINISHED:
                return  # the sequence ended at an earlier token of this path, or while this step ran
            if sequence.guesses:
                # The keys and values of an accepted sibling (an alternative guess) are not in the cache slot
                # of its position, so the next step computes this token again.
                computed += node == place == computed + 1
                sequence.num_computed = begin + computed
                self.num_guessed_tokens += place > 0
            self._touched[request] = None
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = time.monotonic()
            i = first + node
            error, scores = in_flight.failed.get(i), in_flight.scores.get(i)
            if error is None and scores is not None and math.isnan(scores.chosen):
                error = NOT_FINITE  # allowed_token_ids, for example, can hide NaN logits from the draw
            if error is not None:
                self._fail(request, error)
            elif request.beam is not None:
                assert scores is not None
                beams = self._beams[request]
                best = zip(scores.tokens[0].tolist(), scores.best[0].tolist(), strict=True)
                if beams.receive(sequence, list(best)):
                    self._generation_tokens += len(beams.live)
                    beams.advance(self.scheduler)
            else:
                try:
                    self._take_token(sequence, tokens[node], scores)
                except NOT_ERRORS:
                    raise
                except BaseException as error:  # a matcher or the tokenizer failed, maybe by a panic of Rust
                    self._fail(request, f"{type(error).__name__}: {error}")

    def _take_token(self, sequence: Sequence, token: int, scores: Scores | None) -> None:
        request, params = sequence.request, sequence.request.params
        sequence.append(token)
        self._generation_tokens += 1
        if scores is not None:
            if sequence.logprobs is None:
                sequence.logprobs = self._flat_logprobs()
            sequence.logprobs.add([token], *(tensor.flatten().tolist() for tensor in scores))
            sequence.cumulative_logprob += scores.chosen.item()
        matcher = sequence.matcher
        if matcher is not None and not matcher.consume_token(token):  # a limit of the matcher was reached
            self._fail(request, f"{NOT_CONTINUED}: {error_of(matcher)}")
        elif token in request.ends:
            stop = token if token in (params.stop_token_ids or ()) else None
            self.scheduler.finish(sequence, "stop", stop)
        elif params.stops:
            count = len(sequence.tokens) - request.num_prompt
            found = self._read_text(sequence, search=count > params.min_tokens)
            if found is not None:
                self.scheduler.finish(sequence, "stop", found)
        if sequence.state is not State.FINISHED and matcher is not None and matcher.is_stopped():
            self.scheduler.finish(sequence, "stop")
        if sequence.state is not State.FINISHED and len(sequence.tokens) >= sequence.max_tokens:
            self.scheduler.finish(sequence, "length")

    def _flat_logprobs(self, missing: int = 0) -> FlatLogprobs:
        return FlatLogprobs(None if self.tokenizer is None else self.tokenizer.spell, missing)

    def _fail(self, request: Request, error: str) -> None:
        """End a request with an error. After NaN or infinite logits, also empty the prefix cache."""
        self._touched[request] = None
        self._end(request, "error", error)
        if error == NOT_FINITE:
            self.scheduler.manager.reset_prefix_cache()

    def _end(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason, stop_reason)

    def _detokenizer(self, sequence: Sequence) -> Detokenizer:
        if sequence.detokenizer is None:
            assert self.tokenizer is not None
            request, params = sequence.request, sequence.request.params
            sequence.detokenizer = Detokenizer(
                self.tokenizer, request.prompt_token_ids, params.skip_special_tokens, tuple(params.stops),
                params.include_stop_str_in_output, params.reasoning,
            )  # fmt: skip
        return sequence.detokenizer

    def _read_text(self, sequence: Sequence, end: int | None = None, search: bool = False) -> str | None:
        """Append the text of new tokens, up to ``tokens[:end]``, to an answer's text.

        Returns the stop text that was found, or None.
        """
        detokenizer = self._detokenizer(sequence)
        begin = sequence.request.num_prompt + detokenizer.tokens_read
        return detokenizer.read(sequence.tokens[begin:end], search)

    def _output(self, request: Request) -> RequestOutput | None:
        """Return the output of a request, or None if it is unfinished and only its final output is wanted.

        A finished request is removed from the engine. If the tokenizer fails, the request ends with an error.
        """
        try:
            return self._readable_output(request)
        except NOT_ERRORS:
            raise
        except BaseException as error:  # maybe a panic of Rust code
            request.readable = False
            message = f"the tokenizer cannot decode the answer: {type(error).__name__}: {error}"
            self._fail(request, message)
            for sequence in request.sequences:
                sequence.finish_reason, sequence.stop_reason = "error", message
            return self._readable_output(request)

    def _readable_output(self, request: Request) -> RequestOutput | None:
        finished, params = request.finished, request.params
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        if request.beam is not None:
            outputs = self._beam_outputs(request, request.beam)
        else:
            outputs = [self._completion(sequence, params) for sequence in request.sequences]
        if finished:
            request.metrics.finished_time = time.monotonic()
            self.requests.pop(request.request_id, None)
            self._beams.pop(request, None)
            request.matchers = None
            for sequence in request.sequences:
                sequence.matcher, sequence.ngrams, sequence.detokenizer = None, {}, None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=request.prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=request.metrics,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _completion(self, sequence: Sequence, params: SamplingParams) -> CompletionOutput:
        request, text, finished = sequence.request, "", sequence.state is State.FINISHED
        first = request.num_prompt
        delta = params.output_kind is RequestOutputKind.DELTA
        if self.tokenizer is not None and params.detokenize and request.readable:
            detokenizer = self._detokenizer(sequence)
            # Neither the end token nor anything after a stop text belongs to the answer's text.
            by_token = finished and len(sequence.tokens) > first and sequence.tokens[-1] in request.ends
            by_text = isinstance(sequence.stop_reason, str) and sequence.finish_reason == "stop"
            if not by_text:
                keep = not by_token or params.include_stop_str_in_output
                self._read_text(sequence, None if keep else -1)
                if finished:
                    detokenizer.finish()
            text = detokenizer.take() if delta else detokenizer.certain
        sent = 0
        if delta:
            sent, sequence.num_sent = sequence.num_sent, len(sequence.tokens) - first
        logprobs: Any = None
        if params.logprobs is not None:
            logprobs = [] if sequence.logprobs is None else sequence.logprobs.since(sent)
        return CompletionOutput(
            sequence.index, text, sequence.tokens[first + sent :],
            sequence.cumulative_logprob if params.logprobs is not None else None,
            logprobs, sequence.finish_reason, sequence.stop_reason,
        )  # fmt: skip

    def _beam_outputs(self, request: Request, params: BeamSearchParams) -> list[CompletionOutput]:
        failed = [one for one in request.sequences if one.finish_reason in ("abort", "error")]
        if failed:
            return [
                CompletionOutput(
                    i, "", one.outputs, one.cumulative_logprob, None, one.finish_reason, one.stop_reason
                )
                for i, one in enumerate(failed)
            ]
        outputs = []
        for i, beam in enumerate(self._beams[request].complete):
            tokens = beam.tokens if params.include_stop_str_in_output or not beam.ended else beam.tokens[:-1]
            text = ""
            if self.tokenizer is not None:
                stream = self.tokenizer.stream(request.prompt_token_ids)
                text = "".join(map(stream.step, tokens)) + stream.flush()
            reason = "stop" if beam.ended else "length"
            outputs.append(CompletionOutput(i, text, tokens, beam.cumulative_logprob, None, reason))
        return outputs

    def _count_blocks(self, request: Request) -> tuple[int, int]:
        """Return the number of blocks that a request's answers use, with and without sharing."""
        manager = self.scheduler.manager
        tables = [
            manager.blocks(one.block_sequence) for one in request.sequences
            if one.block_sequence is not None and one.state is State.RUNNING
        ]  # fmt: skip
        return len({block for table in tables for block in table}), sum(map(len, tables))


def scores(tokens: list[int], output: RequestOutput, name: str = "prompt") -> list[float]:
    """Return the log-probabilities of all tokens but the first, from the output of a request that scores.

    Errors call the tokens ``name``.
    """
    answer = output.outputs[0]
    if answer.finish_reason in ("abort", "error"):
        raise RuntimeError(f"score of {name}: {answer.stop_reason or 'the request was aborted'}")
    entries: list[Any] = [*(output.prompt_logprobs or ())[1:], *(answer.logprobs or ())]
    return [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]
