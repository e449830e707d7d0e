"""Dependent launch of Hopper's decoding kernels: what their programs do before they wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from decode_cases import paged
from flashtile.backends.common import cached_launch
from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.hopper import decode as hopper_decode
from flashtile.problems.decode import CacheTensors, DecodeOptions, DecodeProblem
from gluon_interpreter import copies, inline_asm, interpreted, language
from gluon_interpreter.program import current_partition

Event = tuple[str, tuple[tuple, dict[str, Any]]]
WAIT, ALLOW = "gdc_wait", "gdc_launch_dependents"
PREFETCH, TMA = "prefetch", "TMA load"
SECTOR = 16
"""Elements of a sector of the L2 cache."""

CALLS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "shares of one sequence": ([900], 9, {}),
    "shares of some sequences": ([300, 70, 5], 9, {}),
    "whole work tiles": ([300, 70] * 8, 9, {}),
    "fixed splits": ([300, 70], 9, {"num_splits": 2}),
}
"""Lengths, tokens, and options of calls whose kernels differ."""
SHARES = [name for name in CALLS if name.startswith("shares")]
PAGE = 64


@contextmanager
def noted_events() -> Iterator[dict[tuple[Any, int], list[Event]]]:
    """Yield the accesses to global memory and the steps of dependent launch of each program, in order.

    An event is (name, arguments).
    """
    seen: dict[tuple[Any, int], list[Event]] = {}

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            program = current_partition().program
            seen.setdefault((program.launch, program.index), []).append((name, (arguments, more)))
            return function(*arguments, **more)

        return noted

    accesses = ("load", "store", "atomic_add")
    modules = ((language.CUDA, (WAIT, ALLOW)), (language.TL, accesses), (language.GL, accesses))
    known = [
        (text, noting(PREFETCH, function) if text.startswith("prefetch") else function)
        for text, function in inline_asm.KNOWN
    ]
    with ExitStack() as patches:
        for module, names in modules:
            replaced = {name: noting(name, vars(module)[name]) for name in names}
            patches.enter_context(mock.patch.dict(vars(module), replaced))
        tma = {"async_load": noting(TMA, copies.load)}
        patches.enter_context(mock.patch.dict(language.BY_NAME, tma))
        patches.enter_context(mock.patch.object(inline_asm, "KNOWN", known))
        yield seen


def call_of(name: str, device: str) -> tuple[Any, tuple]:
    """Return (launch, its arguments) of a call."""
    lengths, tokens, options = CALLS[name]
    (q, *caches), arguments = paged(lengths, (4, 1), page_size=PAGE, seqlen_q=tokens, device="cpu")
    q, *caches = (tensor.to(device) for tensor in (q, *caches))
    given = CacheTensors(**{name: tensor.to(device) for name, tensor in arguments.items()})
    options = DecodeOptions(backend="hopper", window_right=0, **options)
    problem = DecodeProblem.from_tensors(q, *caches, given, options)
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    return launch, (q, *caches, given)


@pytest.mark.parametrize("name", CALLS)
def test_programs_wait_before_they_access_memory(name: str) -> None:
    """Then they let the next kernel start. Before, they read only what selects keys to prefetch.

    The portable combining kernel also reads lengths.
    """
    with interpreted() as interpreter, noted_events() as seen:
        launch, arguments = call_of(name, "cpu")
        launch(*arguments)
    assert ("combine_kernel" in interpreter.launched) == (name == "fixed splits")
    for events in seen.values():
        names = [name for name, _ in events]
        assert names.count(WAIT) == names.count(ALLOW) == 1
        if names[0] == ALLOW:  # the portable combining kernel
            assert set(names[1 : names.index(WAIT)]) <= {"load"}
            continue
        wait = names.index(WAIT)
        assert names[wait + 1] == ALLOW
        for event, (_, more) in events[:wait]:
            assert event == PREFETCH or (event == "load" and more["cache_modifier"] == ".cg")
        assert name in SHARES or wait == 0


def sectors_of_copies(events: list[Event], caches: list[Tensor], count: int) -> set[tuple[int, int]]:
    """Return (address of the cache, sector) of all that the first ``count`` TMA loads of each cache load."""
    found = set()
    for cache in caches:
        loads = [given for name, (given, _) in events if name == TMA]
        loads = [given for given in loads if given[0].buffer.address == cache.data_ptr()]
        for box, where, *_ in loads[:count]:
            elements = box.part_of(torch.arange(len(box.row)), [int(x) for x in where])
            if elements is not None:
                found |= {(cache.data_ptr(), x) for x in (elements // SECTOR).flatten().tolist()}
    return found


@pytest.mark.parametrize("name", SHARES)
def test_programs_prefetch_the_keys_that_they_load_first(name: str) -> None:
    with interpreted(), noted_events() as seen:
        launch, arguments = call_of(name, "cpu")
        launch(*arguments)
    caches, config = list(arguments[1:3]), launch._config
    copies_of_n_block = config.tile.BLOCK_N // PAGE
    at_once = config.STAGES * copies_of_n_block
    # Where a program takes shares of several work tiles, only the first is prefetched.
    surely = at_once if len(CALLS[name][0]) == 1 else copies_of_n_block
    first_key = {(cache.data_ptr(), x) for cache in caches for x in range(cache.shape[-1] // SECTOR)}
    programs = [events for events in seen.values() if any(event == TMA for event, _ in events)]
    assert len(programs) > 1
    for events in programs:
        asked = {
            (pointers.buffer.address, sector)
            for event, (given, _) in events if event == PREFETCH
            for pointers in given[:1] for sector in (pointers.offset // SECTOR).flatten().tolist()
        }  # fmt: skip
        assert sectors_of_copies(events, caches, surely) <= asked
        assert asked - first_key <= sectors_of_copies(events, caches, at_once)


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_is_a_dependent_launch(name: str) -> None:
    with compiling_for(Target("H200", (9, 0), 132)), cached_launch.recording() as launches:
        launch, arguments = call_of(name, "meta")
        launch(*arguments)
    assert len(launches) > 1
    assert all(launch.options["launch_pdl"] for launch, _ in launches)
