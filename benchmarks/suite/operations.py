"""Standard attention of a workload by operation: the contestant whose operations are timed one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.suite.inputs import Inputs
from benchmarks.suite.peers import PeerCall, Standard, hidden_scores, repeated
from benchmarks.suite.workload import Workload
from flashtile.tools.demo.operations import FIRST, MASK, SECOND, SOFTMAX, functions, steps


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
        named = _steps(workload, inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = named[MASK](named[FIRST](q, repeated(k, workload)))
            return named[SECOND](named[SOFTMAX](scores), repeated(v, workload))

        return PeerCall(attend, heads_first=True)

    def functions(self, workload: Workload, inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
        """Return, by the name of an operation, a function without arguments that runs it once.

        The inputs of an operation are the results of the previous operations, which are computed here.
        """
        call = PeerCall(lambda q, k, v: q, heads_first=True)
        q, k, v = (call.arrange(t) for t in (inputs.q, inputs.k, inputs.v))
        k, v = repeated(k, workload), repeated(v, workload)
        return functions(_steps(workload, inputs), q, k, v)


def _steps(workload: Workload, inputs: Inputs) -> dict[str, Callable[..., Tensor]]:
    return steps(hidden_scores(workload, inputs), workload.head_dim**-0.5)
