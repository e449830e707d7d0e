"""The operations of standard attention. Each is timed, and their sum is compared with flashtile's fused call.

This repeats the measurement of GPT-2 in FlashAttention's paper (Dao et al. 2022, arXiv:2205.14135, figure 1).
Each of the operations (matrix product, mask, softmax, dropout, matrix product) reads or writes the scores in
memory. The fused kernel does not. The sum and the fused call are compared twice: both with dropout, and both
without.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.tools.bench.inputs import Inputs
from flashtile.tools.bench.peers import PeerCall, Standard, hidden_scores, repeated
from flashtile.tools.bench.workload import Workload

DROPOUT = 0.1
"""Dropout probability of GPT-2 in training."""

FIRST, MASK, SOFTMAX, DROP, SECOND = "q k", "mask", "softmax", "dropout", "p v"
NAMES = (FIRST, MASK, SOFTMAX, DROP, SECOND)
FUSED = "fused"
"""Name of flashtile's call with dropout, which is timed with the operations."""


class Operations(Standard):
    """Standard attention as separate operations, each of which writes its result to memory."""

    name = "standard, by operation"
    STORED_COPIES = 6
    """Number of tensors as large as the scores.

    They are scores, masked scores, P, P with dropout, the dropout mask, and the current result.
    """

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.varlen or workload.changes_scores or workload.cache is not None or workload.fp8:
            return "times dense calls without soft-cap, ALiBi and sink only"
        if workload.causal and workload.seqlen_q > workload.seqlen_k:
            return "times calls only in which every row sees a key"
        return super().refuses(workload, device)

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        """Return a call that runs the operations one after the other, without dropout.

        With dropout, the result would be random and could not be checked.
        """
        steps = _steps(workload, inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = steps[MASK](steps[FIRST](q, repeated(k, workload)))
            return steps[SECOND](steps[SOFTMAX](scores), repeated(v, workload))

        return PeerCall(attend, heads_first=True)

    def functions(self, workload: Workload, inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
        """Return, by the name of an operation, a function without arguments that runs it once.

        The inputs of an operation are the results of the previous operations, which are computed here.
        """
        call = PeerCall(lambda q, k, v: q, heads_first=True)
        q, k, v = (call.arrange(t) for t in (inputs.q, inputs.k, inputs.v))
        k, v = repeated(k, workload), repeated(v, workload)
        steps = _steps(workload, inputs)
        given: dict[str, tuple[Tensor, ...]] = {FIRST: (q, k)}
        for name, following in itertools.pairwise(NAMES):
            result = steps[name](*given[name])
            given[following] = (result, v) if following == SECOND else (result,)
        return {name: partial(steps[name], *given[name]) for name in NAMES}


def _steps(workload: Workload, inputs: Inputs) -> dict[str, Callable[..., Tensor]]:
    """Return the operations of standard attention by name, for tensors (batch, heads, seqlen, head_dim).

    If the workload has no mask, the operation "mask" returns its input.
    """
    hidden, scale = hidden_scores(workload, inputs), workload.head_dim**-0.5
    return {
        FIRST: lambda q, k: (q * scale) @ k.transpose(-2, -1),
        MASK: lambda scores: scores if hidden is None else scores.masked_fill(hidden, -torch.inf),
        SOFTMAX: lambda scores: torch.softmax(scores, -1),
        DROP: lambda p: F.dropout(p, DROPOUT, training=True),
        SECOND: torch.matmul,
    }


def summarized(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the entry "operations" of a cell (one workload in one pass) in the JSON document of results.

    Times are in milliseconds. ``ms`` has the median time of each operation, and ``together_ms`` is the sum of
    these medians. ``fused_dropout_ms`` is the median time of flashtile's call with dropout. It is missing if
    ``times`` has none.

    Args:
        times: time in each round of each operation and of :data:`FUSED`, by name.
    """
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    fused = {"fused_dropout_ms": medians.pop(FUSED)} if FUSED in medians else {}
    return {"ms": medians, "together_ms": sum(medians.values()), "dropout_p": DROPOUT} | fused
