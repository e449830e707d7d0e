"""Reports which backend and configuration a call would get, and why the others were passed over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashtile.api.attention import attention
from flashtile.backends.common.device import Target
from flashtile.checks.arguments import as_int, named
from flashtile.hardware.calls import Call, least_bytes, least_flops, visited_scores
from flashtile.op.operation import describing
from flashtile.op.selection import Choice, choose, load_part, on_target
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.operators.weights import WEIGHTS
from flashtile.problems.attention import Problem
from flashtile.problems.common import PREFERENCE
from flashtile.torch_private import DataDependentOutputException

if TYPE_CHECKING:
    from flashtile.hardware.cards import Card


@dataclass(frozen=True)
class Explanation:
    """The choices for the operations of a call, in the order in which the operations run.

    ``operations`` lists their names: "forward", "backward" and "weights" of attention, "append_kvcache" and
    "decode" over a cache, "fp8_quantize" and "fp8_attend". ``backend``, ``config``, ``problem`` and
    ``reasons_against`` belong to ``main``, the operation that computes the result. ``str()`` gives three
    lines: the kernels, why they were chosen, and which preferred backends were refused. ``details`` has every
    field.
    """

    choices: tuple[Choice, ...]

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(choice.operation for choice in self.choices)

    @property
    def main(self) -> Choice:
        additional = BACKWARD.name, WEIGHTS.name
        return next(c for c in reversed(self.choices) if c.operation not in additional)

    @property
    def backend(self) -> str | None:
        return self.main.backend

    @property
    def config(self) -> Any:
        return self.main.config

    @property
    def problem(self) -> Any:
        return self.main.problem

    @property
    def reasons_against(self) -> dict[str, str]:
        return self.main.reasons_against

    def __getitem__(self, operation: str) -> Choice:
        """Return the last choice for ``operation``."""
        return next(choice for choice in reversed(self.choices) if choice.operation == operation)

    @property
    def details(self) -> str:
        """The backend, configuration and problem of every operation, and why other backends were refused."""
        if len(self.choices) == 1:
            return str(self.choices[0])
        return "\n\n".join(f"{choice.operation}\n{choice}" for choice in self.choices)

    def floor(self, lengths: Sequence[int]) -> str:
        """Describe the least that packed sequences of these ``lengths``, which no call tells the host, take.

        A line for each pass has the least bytes, and the FLOPs of the visible scores and of the tiles that
        the kernel visits. The latter are more: a mask cuts tiles, and sequences end within tiles.

        Raises:
            TypeError: ``lengths`` are no list of ints.
            ValueError: the call has no packed sequences of these lengths.

        Examples:
            >>> q = torch.empty(4096, 32, 128, dtype=torch.bfloat16, device="meta")
            >>> offsets = torch.empty(3, dtype=torch.int32, device="meta")
            >>> packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 4000}
            >>> explanation = flashtile.explain(q, q, q, max_seqlen_k=4000, causal=True, **packed)
            >>> print(explanation.floor([4000, 96]).splitlines()[0])
            forward: at least 134.7 MB and 131.2 GFLOPs
        """
        problem = self.problem
        if isinstance(lengths, str) or not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be a list of ints, got {named(lengths)}")
        lengths = [as_int("lengths", length) for length in lengths]
        if not isinstance(problem, Problem) or not problem.varlen:
            raise ValueError(
                f"lengths are those of packed sequences (cu_seqlens_q), got {lengths} for a call without any"
            )
        packed = problem.total_q
        if sum(lengths) != packed or not packed or min(lengths) < 0:
            raise ValueError(
                f"lengths must be at least 0 and add up to the call's {packed} packed tokens, got {lengths}"
            )
        if problem.total_k != packed:
            raise ValueError(
                f"lengths are those of {packed} queries, but the call has {problem.total_k} keys"
            )
        call = replace(Call.from_problem(problem), lengths=tuple((length, length) for length in lengths))
        passes = (choice for choice in self.choices if choice.operation in (FORWARD.name, BACKWARD.name))
        return "\n".join(_floor(call, choice) for choice in passes)

    def __str__(self) -> str:
        kernels = "; ".join(dict.fromkeys(map(_kernel, self.choices)))
        refused = (
            "; ".join(_refusals(self.choices)) or f"nothing; {self.backend} is the most preferred backend"
        )
        return f"kernel: {kernels}\nwhy: {_why(self.main)}\nrefused: {refused}"


def _tile_of(choice: Choice) -> tuple[int, int] | None:
    """Return the size of an operation's tiles (queries, keys), or None if its kernel has none."""
    part = _part(choice)
    queries, keys = getattr(part, "BLOCK_M", None), getattr(part, "BLOCK_N", None)
    return None if queries is None or keys is None else (queries, keys)


def _floor(call: Call, choice: Choice) -> str:
    """Return the line of :meth:`Explanation.floor` for a pass."""
    which, tile = choice.operation, _tile_of(choice)
    least = least_flops(call, which)
    line = f"{which}: at least {least_bytes(call, which) / 1e6:,.1f} MB and {least / 1e9:,.1f} GFLOPs"
    if tile is None:
        return line
    part, heads, rows = load_part(str(choice.backend), FORWARD), 1, 1
    if which == FORWARD.name and hasattr(part, "heads_of_tile"):
        heads, rows = part.heads_of_tile(choice.problem, choice.config)
    tokens = tile[0] // rows
    visited = visited_scores(call, (tokens, tile[1])) * tile[0] / (tokens * heads)
    share = call.visible_pairs / max(visited, 1)
    return (
        f"{line}; {share:.0%} of the scores in visited tiles of {tile[0]} x {tile[1]} are visible, "
        f"so the products of whole tiles are {least / share / 1e9:,.1f} GFLOPs"
    )


def _part(choice: Choice) -> Any:
    """Return the part of a configuration that is an operation's own."""
    part = choice.config
    for name in (choice.operation, "dkdv" if choice.operation == BACKWARD.name else "tile"):
        part = getattr(part, name, part)
    return part


def _kernel(choice: Choice) -> str:
    """Describe the kernel of an operation: its backend, and its tile size (queries x keys)."""
    if choice.backend is None:
        return f"{choice.operation}: none"
    tile = _tile_of(choice)
    how = getattr(_part(choice), "KERNEL", "" if tile is None else f"tiles of {tile[0]} x {tile[1]}")
    return f"{choice.operation}: {choice.backend}" + (f", {how}" if how else "")


def _why(choice: Choice) -> str:
    place = f"on {choice.problem.device}"
    if choice.requested is not None:
        serves = "" if choice.backend is not None else f", and does not serve this call {place}"
        return f"backend={choice.requested!r} was requested{serves}"
    order = ", ".join(PREFERENCE)
    if choice.backend is None:
        return f"none of the backends {order} serves this call {place}"
    return f"{choice.backend} is the first of the backends {order} that serves this call {place}"


def _refusals(choices: tuple[Choice, ...]) -> list[str]:
    """Return, for each backend that is preferred to the chosen one, the reason why it was refused.

    If a backend was refused for only some of the operations, the text names these operations.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        preferred = PREFERENCE[: PREFERENCE.index(choice.backend)] if choice.backend else PREFERENCE
        for name in preferred:
            operations = found.setdefault((name, choice.reasons_against[name]), [])
            if choice.operation not in operations:
                operations.append(choice.operation)
    every = len(dict.fromkeys(choice.operation for choice in choices))
    return [
        f"{name}{'' if len(operations) == every else ' for ' + ' and '.join(operations)} ({reason})"
        for (name, reason), operations in found.items()
    ]


def described_calls(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], card: Card | None
) -> list[tuple[Any, Any, str | None]]:
    """Return (operation, problem, requested backend) of each operation of a call. Nothing is launched.

    Args:
        function: the function of the call, if the first of ``arguments`` is not one.
        card: the card of the problems; None: the device of the call's tensors.
    """
    if arguments and callable(arguments[0]):
        function, *arguments = arguments  # type: ignore[assignment]
    else:
        parameters = inspect.signature(function).parameters.values()
        most = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        if len(arguments) > most:
            raise TypeError(
                f"explain takes at most {most} positional arguments of {function.__name__}, got "
                f"{len(arguments)}: pass another function first, as in explain(flash_attn_varlen_func, ...)"
            )
    name = getattr(function, "__name__", type(function).__name__)
    try:
        with describing(arguments, keywords) as described:
            function(*arguments, **keywords)
    except DataDependentOutputException:
        raise NotImplementedError(
            f"explain takes functions that need no values of their tensors, got {name}, which reads some"
        ) from None
    if not described:
        raise ValueError(f"explain takes a function that calls flashtile, got {name}, which launches nothing")
    if card is None:
        return described
    target = Target.of_card(card)
    return [(operation, on_target(problem, target), backend) for operation, problem, backend in described]


def explain(*arguments: Any, card: Card | None = None, **keywords: Any) -> Explanation:
    """Say which backend and configuration a call would get, and why the other backends were refused.

    ``explain(q, k, v, causal=True)`` explains :func:`flashtile.attention`, forward and backward. For another
    function, pass it first: ``explain(flash_attn_with_kvcache, q, k_cache, v_cache)``. Nothing is launched
    and no data is read, so meta and fake tensors also work.

    Args:
        arguments, keywords: those of the call, after its function.
        card: one of :data:`flashtile.io_model.CARDS`, to explain the call on that card instead of on the
            device of its tensors. The tensors are then assumed to be aligned for that card's kernels.

    Raises:
        TypeError, ValueError, NotImplementedError: the call's own error, if no backend could take its
            arguments.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 128, 4, 64).unbind()
        >>> explanation = flashtile.explain(q, k, v, causal=True)
        >>> explanation.backend
        'cpu'
        >>> explanation.operations
        ('forward', 'backward')
        >>> print(str(explanation).splitlines()[0])
        kernel: forward: cpu, torch's flash kernel; backward: cpu, torch's flash kernel
        >>> explanation.reasons_against["portable"]
        'its kernels run on GPUs, not on cpu (TRITON_INTERPRET=1 interprets them)'
    """
    choices = []
    for operation, problem, backend in described_calls(attention, arguments, keywords, card):
        choices.append(choose(operation, problem, backend))
        if operation is FORWARD:
            if problem.invariant and choices[-1].backend is None:
                raise NotImplementedError(
                    "invariant must be False where no forward kernel has the bits of single tokens, got "
                    "True: explain flash_attn_with_kvcache instead"
                )
            choices.append(choose(BACKWARD, problem, backend))
    return Explanation(tuple(choices))
