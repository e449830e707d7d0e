"""The random state of dropout, and the operator that draws it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.op.registry import define, implement
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.torch_private import activation_memory_budget


def with_state(
    q: Tensor, extras: OptionalTensors, options: Options, rng_state: Tensor | None = None
) -> OptionalTensors:
    """Return ``extras`` with ``rng_state``. If it is None and there is dropout, it is drawn.

    If dropout_p is invalid, nothing is drawn, and a later check raises.
    """
    if rng_state is None and isinstance(q, Tensor) and 0 < options.dropout_p < 1:
        rng_state = draw_state(q)
    return extras if rng_state is None else extras._replace(rng_state=rng_state)


def draw_state(q: Tensor) -> Tensor:
    """Draw (2,) int64, seed and offset, from torch's generator of q's device.

    This is an ordinary operation: each replay of a CUDA graph draws new numbers. Checkpointing restores the
    generator's state and draws the same numbers again.

    Raises:
        NotImplementedError: q is a DTensor.
    """
    if type(q).__name__ == "DTensor":
        raise NotImplementedError(
            "rng_state must be given with dropout_p if q is a DTensor, replicated: each device would "
            "draw its own"
        )
    return _operator(q) if torch.compiler.is_dynamo_compiling() else _draw(q)


def _draw(q: Tensor) -> Tensor:
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def _draw_for_both_passes(q: Tensor) -> Tensor:
    """Draw a state in a traced graph, which must save it for the backward pass.

    Otherwise a graph with ``activation_memory_budget`` below 1 may draw it again in the backward pass,
    because that is cheap, and drop other probabilities there. A region of ``torch.utils.checkpoint`` has set
    its own policy: it restores the generator's state.

    Raises:
        NotImplementedError: the budget is 0. Graphs then save only their inputs, against any policy.
    """
    from torch.fx.traceback import get_current_meta, preserve_node_meta
    from torch.utils.checkpoint import CheckpointPolicy

    if activation_memory_budget() == 0 and torch.is_grad_enabled():
        raise NotImplementedError(
            "rng_state must be given with dropout_p under torch.compile if activation_memory_budget is 0, "
            "got None: the backward pass would draw another state"
        )
    with preserve_node_meta():  # leaving it discards the entry
        get_current_meta().setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        return _draw(q)


_operator = define("draw_state", "draw_state(Tensor q) -> Tensor", (torch.Tag.nondeterministic_seeded,))
# A composite, so compiled graphs contain torch.randint, which inductor fuses.
implement("draw_state", "CompositeImplicitAutograd", _draw_for_both_passes)
