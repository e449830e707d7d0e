"""Dependent launch of Hopper's decoding kernels: what their programs do before they wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from decode_cases import paged
from flashtile.backends.common import cached_launch
from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.hopper import decode as hopper_decode
from flashtile.problems.decode import CacheTensors, DecodeOptions, DecodeProblem
from gluon_interpreter import copies, interpreted, language
from gluon_interpreter.program import current_partition

Event = tuple[str, dict[str, Any]]
WAIT, ALLOW = "gdc_wait", "gdc_launch_dependents"

CALLS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "shares of one sequence": ([700], 9, {}),
    "whole work tiles": ([300, 70] * 8, 9, {}),
    "fixed splits": ([300, 70], 9, {"num_splits": 2}),
}
"""Lengths, tokens, and options of calls whose kernels differ."""


@contextmanager
def noted_events() -> Iterator[dict[tuple[Any, int], list[Event]]]:
    """Yield the accesses to global memory and the steps of dependent launch of each program, in order."""
    seen: dict[tuple[Any, int], list[Event]] = {}

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            program = current_partition().program
            seen.setdefault((program.launch, program.index), []).append((name, more))
            return function(*arguments, **more)

        return noted

    with ExitStack() as patches:
        for module, names in (
            (language.CUDA, (WAIT, ALLOW)),
            *((module, ("load", "store", "atomic_add")) for module in (language.TL, language.GL)),
        ):
            replaced = {name: noting(name, vars(module)[name]) for name in names}
            patches.enter_context(mock.patch.dict(vars(module), replaced))
        patches.enter_context(mock.patch.object(copies, "load", noting("TMA load", copies.load)))
        yield seen


def call_of(name: str, device: str) -> tuple[Any, tuple]:
    """Return (launch, its arguments) of a call."""
    lengths, tokens, options = CALLS[name]
    (q, *caches), arguments = paged(lengths, (4, 2), seqlen_q=tokens, device="cpu")
    q, *caches = (tensor.to(device) for tensor in (q, *caches))
    given = CacheTensors(**{name: tensor.to(device) for name, tensor in arguments.items()})
    options = DecodeOptions(backend="hopper", window_right=0, **options)
    problem = DecodeProblem.from_tensors(q, *caches, given, options)
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    return launch, (q, *caches, given)


@pytest.mark.parametrize("name", CALLS)
def test_programs_wait_before_they_access_memory(name: str) -> None:
    """Then they let the next kernel start. The portable combining kernel reads lengths before it waits."""
    with interpreted() as interpreter, noted_events() as seen:
        launch, arguments = call_of(name, "cpu")
        launch(*arguments)
    assert ("combine_kernel" in interpreter.launched) == (name == "fixed splits")
    for events in seen.values():
        names = [name for name, _ in events]
        assert names.count(WAIT) == names.count(ALLOW) == 1
        if names[0] == ALLOW:  # the portable combining kernel
            assert set(names[1 : names.index(WAIT)]) <= {"load"}
        else:
            assert names[:2] == [WAIT, ALLOW]


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_is_a_dependent_launch(name: str) -> None:
    with compiling_for(Target("H200", (9, 0), 132)), cached_launch.recording() as launches:
        launch, arguments = call_of(name, "meta")
        launch(*arguments)
    assert len(launches) > 1
    assert all(launch.options["launch_pdl"] for launch, _ in launches)
