"""Beam search: keep the ``width`` likeliest texts at every step. Beams share the blocks of common prefixes.

The rules are those of Transformers with ``early_stopping=False``. Each step ranks the best
(number of end tokens + 1) * width continuations. Among the first ``width``, those with an end token become
complete texts. The best ``width`` continuations without an end token are the next beams. The search is over
once ``width`` texts are complete and the best live beam, scored at its present length, could not displace the
worst complete text.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.engine.request import Request, Sequence, State
from flashtile.engine.sampling_params import BeamSearchParams
from flashtile.engine.scheduler import Scheduler


@dataclass
class Beam:
    """A complete text: its tokens after the prompt, their log-probability, and its length-normalised score.

    ``ended`` is True if an end token completed the text, and False if the length limit did.
    """

    tokens: list[int]
    cumulative_logprob: float
    score: float
    ended: bool


class BeamSearch:
    """The beams of one request."""

    def __init__(self, request: Request, params: BeamSearchParams):
        self.request, self.params = request, params
        self.complete: list[Beam] = []  # at most ``beam_width`` complete texts, the best first
        self._found: dict[Sequence, list[tuple[int, float]]] = {}

    @property
    def live(self) -> list[Sequence]:
        return [one for one in self.request.sequences if one.state is not State.FINISHED]

    def receive(self, sequence: Sequence, best: list[tuple[int, float]]) -> bool:
        """Store a beam's likeliest (token, log-probability) pairs, and exclude the beam from further steps.

        Returns True once the pairs of every live beam are stored.
        """
        sequence.held = True
        self._found[sequence] = best
        return all(one in self._found for one in self.live)

    def advance(self, scheduler: Scheduler) -> None:
        """Choose the next beams from the received tokens, or end the request if the search is over."""
        request, width = self.request, self.params.beam_width
        old = self.live
        candidates = [
            (one.cumulative_logprob + logprob, parent, token)
            for parent, one in enumerate(old)
            for token, logprob in self._found[one]
        ]
        self._found.clear()
        candidates.sort(key=lambda candidate: -candidate[0])
        length = len(old[0].tokens) + 1 - request.num_prompt
        last = length >= request.max_outputs
        new: list[Sequence] = []
        parents: list[int] = []
        for rank, (total, parent, token) in enumerate(candidates[: (len(request.ends) + 1) * width]):
            ended = token in request.ends
            if (ended or last) and rank < width:
                tokens = [*old[parent].outputs, token]
                self._complete(Beam(tokens, total, total / length**self.params.length_penalty, ended))
            elif not ended and not last and len(new) < width:
                one = Sequence(request, len(new), [*old[parent].tokens, token])
                one.cumulative_logprob = total
                new.append(one)
                parents.append(parent)
        if not last and new:
            possible = new[0].cumulative_logprob / length**self.params.length_penalty
            last = len(self.complete) == width and possible <= self.complete[-1].score
        if last or not new:
            for one in old:
                scheduler.finish(one, "length")
            return
        request.sequences = new
        scheduler.replace(old, new, parents)

    def _complete(self, beam: Beam) -> None:
        self.complete = sorted([*self.complete, beam], key=lambda one: -one.score)[: self.params.beam_width]
