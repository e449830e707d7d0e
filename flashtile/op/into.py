"""Operations that write their results into the caller's memory: ``out=``, ``lse=`` and ``mass=``.

Each operation is ``torch.ops.flashtile.<name>_into``, whose schema mutates the buffers and returns nothing. A
launch with the attribute ``writes_into`` takes a buffer or None for each result, after its other arguments,
and writes directly into these buffers. Without the attribute, or if a buffer is not contiguous and aligned,
the result is copied into the buffer. A buffer that a launch names in ``adds_to`` holds numbers to which it
adds, so the launch always gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import check_buffer
from flashtile.op.operation import Operation, is_plain, tell_written
from flashtile.op.refusals import transforming

ALIGNMENT = 16
"""Alignment, in bytes, that compiled kernels assume for results. Memory that torch allocates has it."""

Result = tuple[tuple[int, ...], torch.dtype]


class Into(Operation):
    """Writes the results of ``operation`` into the caller's memory.

    Args:
        operation: an operation without a backward pass, or the forward pass of an operation that has one.
        buffers: names of the results; only the first exists in every call.
        results_of: ``(*tensors, optional, options) -> results``: (shape, dtype) of each result, or None for a
            result that the call does not return.
        name: name for which backends have launches of their own. None: those of ``operation`` are used.
    """

    def __init__(
        self,
        operation: Operation,
        buffers: tuple[str, ...],
        results_of: Callable[..., tuple[Result | None, ...]],
        name: str | None = None,
    ) -> None:
        self.of, self.buffers, self.results_of = operation, buffers, results_of
        self.all_buffers = " and ".join((", ".join(buffers[:-1]), buffers[-1]))
        self._first = len(operation.tensors)
        """Number of tensors before the buffers."""
        optional = [f"{name}?" for name in buffers[1:]]
        super().__init__(
            name or operation.name,
            suffix="" if name else "_into",
            part=operation.part,
            tensors=(*operation.tensors, buffers[0], *optional),
            optional=operation.nothing,
            options=operation.options,
            results=0,
            mutates=buffers,
            check=self._check,
            describe=partial(self._without_buffers, operation.describe),
            flops=None if operation.flops is None else partial(self._without_buffers, operation.flops),
        )

    def write(self, tensors: tuple, optional: Any, options: Any, buffers: tuple) -> tuple[Tensor | None, ...]:
        """Write the results into ``buffers`` and return them. New memory replaces a buffer that is None."""
        buffers = self.complete(tensors, optional, options, buffers)
        given = (*tensors, *buffers)
        self.refuse_gradients(buffers, self.names, (*given, *optional))
        if is_plain(tensors, optional, buffers):
            self.launch(given, optional, options)
        else:
            with torch.no_grad():
                self.traced(given, optional, options)
        return buffers

    def complete(self, tensors: tuple, optional: Any, options: Any, buffers: tuple) -> tuple[Any, ...]:
        """Return ``buffers``, with new memory for requested results whose buffer is None."""
        *_, out, lse = buffers  # a buffer before these holds numbers already
        if out is not None and (lse is not None or not getattr(options, "return_lse", True)):
            return buffers
        try:
            results = self.results_of(*tensors, optional, options)
            return tuple(
                tensors[0].new_empty(result[0], dtype=result[1]) if buffer is None and result else buffer
                for buffer, result in zip(buffers, results, strict=True)
            )
        except Exception:  # not a tensor, or a tensor of another shape
            self.of.check(*tensors, optional, options)
            raise

    def launch(self, tensors: tuple, optional: Any, options: Any) -> None:
        launch: Any = self.prepared(tensors, optional, options)
        launch.refuse_overlap(tensors, optional)
        self.check_values(tensors, optional, options)
        launch(*tensors, optional)

    def check_values(self, tensors: tuple, optional: Any, options: Any) -> None:
        self.of.check_values(tensors[: self._first], optional, options)

    def prepare(self, tensors: tuple, optional: Any, options: Any) -> LaunchInto:
        launch = self.of.prepared(tensors[: self._first], optional, options)
        return LaunchInto(launch, self, tensors, optional)

    def launch_on_meta(self, tensors: tuple, optional: Any, options: Any, target: Any = None) -> None:
        """Launch the operation without buffers, which needs the same kernels."""
        self.of.launch_on_meta(tensors[: self._first], optional, options, target)

    def refuse_gradients(self, buffers: tuple, names: Iterable[str], tensors: tuple) -> None:
        """Refuse tensors that require grad: no gradient flows through memory that is written in place."""
        for name, buffer in zip(self.buffers, buffers, strict=True):
            if isinstance(buffer, Tensor) and buffer.requires_grad:
                raise ValueError(f"{name} requires grad, but is written in place: it must be detached")
        if transforming():
            raise NotImplementedError(f"{self.all_buffers} must be None under a transform of torch.func")
        if not torch.is_grad_enabled():
            return
        if any([t is not None and getattr(t, "requires_grad", False) for t in tensors]):
            named = zip(names, tensors, strict=False)
            name = next(name for name, t in named if getattr(t, "requires_grad", False))
            raise ValueError(
                f"{self.all_buffers} must be None where {name} requires grad: no gradient flows through "
                "memory that is written in place (call it under torch.no_grad())"
            )

    def _check(self, *arguments: Any) -> None:
        *tensors, optional, options = arguments
        given, buffers = tensors[: self._first], tensors[self._first :]
        self.of.check(*given, optional, options)
        results = self.results_of(*given, optional, options)
        for name, buffer, result in zip(self.buffers, buffers, results, strict=True):
            if buffer is not None and result is not None:
                check_buffer(name, buffer, *result, given[0])

    def _without_buffers(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments[: self._first], *arguments[-2:])


class LaunchInto:
    """A launch ``(*tensors, *buffers, optional)`` for tensors of one signature."""

    def __init__(self, launch: Any, into: Into, tensors: tuple, optional: Any) -> None:
        self._launch = launch
        self._first = len(into.of.tensors)
        added_to = getattr(launch, "adds_to", ())
        named = zip(into.buffers, tensors[self._first :], strict=True)
        self._straight = [name in added_to or _takes(launch, buffer) for name, buffer in named]
        """For each buffer, whether the launch writes to it directly."""
        self._is_straight = all(
            takes or buffer is None
            for takes, buffer in zip(self._straight, tensors[self._first :], strict=True)
        )
        # Sizes follow from signatures, so they are computed once. Only addresses differ from call to call.
        spans = [(i, _span(t), into.names[i]) for i, t in enumerate((*tensors, *optional)) if t is not None]
        # Inputs may overlap each other, because they are only read. So each pair has a buffer.
        self._pairs = [
            (*span, [other for other in spans if other is not span])
            for span in spans
            if span[2] in into.buffers
        ]

    def refuse_overlap(self, tensors: tuple, optional: Any) -> None:
        """Refuse buffers that overlap other tensors.

        This is checked on every call, because launches are cached by signatures, which contain no addresses.
        """
        self._refuse_overlap([None if t is None else t.data_ptr() for t in (*tensors, *optional)])

    def _refuse_overlap(self, addresses: Sequence[Any]) -> None:
        """Refuse overlapping buffers. ``addresses`` are those of all tensors, None for absent ones."""
        for i, size, name, others in self._pairs:
            start = addresses[i]
            end = start + size
            for j, span, other in others:
                address = addresses[j]
                # Two spans overlap if each begins before the other ends.
                if address < end and start < address + span:
                    raise ValueError(
                        f"{name} shares memory with {other}, but is written: it needs its own memory"
                    )

    @property
    def can_launch_by_address(self) -> bool:
        """Whether :meth:`by_address` may be called."""
        return self._is_straight and getattr(self._launch, "can_launch_by_address", False)

    def by_address(self, out: Tensor, given: tuple[int, ...], addresses: tuple, memory: dict) -> None:
        """Write into ``out``, the first of two buffers.

        Tokens of packed tensors that belong to no sequence are not written, or filled with 0.

        Args:
            given: addresses of the tensors that every call has, then that of ``out``.
            addresses: those of the optional tensors.
            memory: what calls that run one after the other on a stream share.
        """
        self._refuse_overlap((*given, None, *addresses))  # None: the second buffer, which such calls lack
        self._launch.by_address(out, given, addresses, memory)
        tell_written([out])

    def __call__(self, *arguments: Any) -> None:
        first = self._first
        tensors, buffers, optional = arguments[:first], arguments[first:-1], arguments[-1]
        straight = self._straight
        if True in straight:
            written = [buffer if takes else None for buffer, takes in zip(buffers, straight, strict=True)]
            results = self._launch(*tensors, optional, *written)
        else:
            results = self._launch(*tensors, optional)  # a launch without ``writes_into`` takes no buffers
        for buffer, takes, result in zip(buffers, straight, results, strict=True):
            if buffer is None:
                continue
            if not takes:
                buffer.copy_(result)
            else:
                tell_written([buffer])  # autograd sees copies, but not what kernels write


def _takes(launch: Any, buffer: Tensor | None) -> bool:
    if buffer is None or not getattr(launch, "writes_into", False):
        return False
    return buffer.is_contiguous() and buffer.data_ptr() % ALIGNMENT == 0


def _span(tensor: Tensor) -> int:
    """Return the bytes from the first to the last element; 0 if the tensor is empty."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
