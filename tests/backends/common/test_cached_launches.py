"""Cached launches pass arguments in order and tensors by address, and call the hooks of profilers."""

from __future__ import annotations

import gc
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from flashtile import torch_private
from flashtile.backends import compat, libcuda
from flashtile.backends.common import direct_launch, tma
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View

GRID = (7, 1, 1)
DEVICE = torch.device("cuda", 1)
Pair = namedtuple("Pair", "first second")


class Compiled:
    """What Triton hands back for a launch, which launches again."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def on_launch(self) -> None:
        """A test may look at the world as a launch finds it."""

    def __getitem__(self, grid: tuple[int, int, int]):
        def launch(*arguments, stream):
            self.launched.append((grid, stream, *arguments))
            self.on_launch()

        return launch


def by_triton(compiled, fixed, views=(), pointers=None):
    return direct_launch.by_triton(compiled, DEVICE.index, GRID, fixed, views, pointers)


def test_tensors_go_by_address():
    compiled, tensor = Compiled(), torch.empty(3)
    launch = by_triton(compiled, (5, 0.5, "constant"))
    launch(11, (tensor, None, 1234))
    launch(12, (tensor, None), (1234,))
    launch.with_fixed((6, 0.5, "constant"))(13, (tensor, None, 1234))
    given = (tensor.data_ptr(), None, 1234)
    assert compiled.launched == [
        (GRID, 11, *given, 5, 0.5, "constant"), (GRID, 12, *given, 5, 0.5, "constant"),
        (GRID, 13, *given, 6, 0.5, "constant"),
    ]  # fmt: skip


def test_addresses_go_in_a_structure(contexts):
    compiled, a, b = Compiled(), torch.empty(3), torch.empty(3)
    by_triton(compiled, (Pair(5, 6),), (SeenBy([3]),), Pair)(11, (a, b, None))
    assert compiled.launched == [(GRID, 11, (a.data_ptr(), [3]), (b.data_ptr(), None), Pair(5, 6))]
    assert isinstance(compiled.launched[0][3], Pair)
    assert contexts == [DEVICE.index]


@pytest.fixture
def contexts(monkeypatch) -> list[int]:
    """The devices whose contexts were made current. Triton encodes descriptors without one."""
    indices: list[int] = []
    monkeypatch.setattr(libcuda, "make_context_current", indices.append)
    return indices


def test_a_descriptor_may_be_absent(contexts):
    """None stands in its place, and no tensor comes for it."""
    compiled, a, b = Compiled(), torch.empty(3), torch.empty(3)
    by_triton(compiled, (5,), (None, SeenBy([3]), None), Pair)(11, (b, a, None))
    assert compiled.launched[0][2:] == (None, (b.data_ptr(), [3]), None, (a.data_ptr(), None), 5)


def test_no_garbage_is_collected_while_a_kernel_is_found(monkeypatch):
    states = []

    def warmup(*arguments, **options):
        states.append(gc.isenabled())  # and nothing is returned, as if a hook had prevented the compilation

    kernel = CachedLaunch(SimpleNamespace(warmup=warmup), GRID[0], (5,), ("constant",), None)
    monkeypatch.setattr(compat, "is_compilable", lambda kernel: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert kernel._direct_launch(DEVICE, (torch.empty(3),)) is None
    assert states == [False]
    assert gc.isenabled()


def test_a_kernel_is_compiled_once_and_runs_on_the_stream_of_its_device(monkeypatch):
    current, compiled, compilations = [DEVICE.index], Compiled(), []

    class Kernel:
        def __getitem__(self, grid):
            assert grid == GRID
            return lambda *arguments, **options: compilations.append(arguments) or compiled

    class On:
        def __init__(self, device: torch.device) -> None:
            self.index, self.before = device.index, current[0]

        def __enter__(self) -> None:
            current[0] = self.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch_private, "cuda_device", lambda: current[0])
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    launched_on: list[int] = []
    compiled.on_launch = lambda: launched_on.append(current[0])  # type: ignore[method-assign]
    kernel = CachedLaunch(Kernel(), GRID[0], (5,), ("constant",), None)
    tensor = torch.empty(3)
    assert not kernel.takes_addresses
    kernel(DEVICE, tensor, None)
    assert kernel.takes_addresses
    for there in (DEVICE.index, 0):  # from another device, too
        current[0] = there
        kernel(DEVICE, tensor, 4096)
        assert current == [there]
    assert compilations == [(tensor, None, 5, "constant")]
    assert launched_on == [DEVICE.index, DEVICE.index]
    assert compiled.launched == [(GRID, 101, tensor.data_ptr(), 4096, 5, "constant")] * 2


@pytest.mark.parametrize("is_direct", [True, False])
def test_triton_launches_only_what_is_not_launched_directly(monkeypatch, is_direct):
    compiled, given, direct = Compiled(), [], []

    class Kernel:
        def warmup(self, *arguments, grid, **options):
            assert triton.runtime.driver._active is not None  # Triton need not create its own driver
            given.append(("compiled", grid, *arguments))
            return compiled

        def __getitem__(self, grid):
            return lambda *arguments, **options: given.append(("launched", grid, *arguments)) or compiled

    def launcher(*arguments):
        given.append(arguments)
        return (lambda stream, tensors: direct.append((stream, tensors))) if is_direct else None

    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(compat, "is_compilable", lambda kernel: True)
    monkeypatch.setattr(torch_private, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(direct_launch, "launcher", launcher)
    kernel, tensor = CachedLaunch(Kernel(), GRID[0], (5,), ("constant",), None), torch.empty(3)
    for _ in range(2):
        kernel(DEVICE, tensor)
    fixed = (5, "constant")
    assert given[:2] == [
        ("compiled", GRID, tensor, *fixed), (compiled, DEVICE.index, GRID, (tensor,), fixed, (), None)
    ]  # fmt: skip
    assert given[2:] == ([] if is_direct else [("launched", GRID, tensor, *fixed)])
    assert direct == ([(101, (tensor,))] * 2 if is_direct else [])
    assert len(compiled.launched) == (0 if is_direct else 1)


def test_other_scalars_for_a_compiled_kernel(monkeypatch):
    """Where Triton would compile the same: it tells integers apart by 1, multiples of 16 and 32 bits."""
    compiled = Compiled()

    class Kernel:
        params = tuple(SimpleNamespace(do_not_specialize=plain) for plain in (False, True, True, False))

        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled

    monkeypatch.setattr(torch_private, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    kernel = CachedLaunch(Kernel(), GRID[0], (32, 5, 0.5), ("constant",), None)
    assert kernel.with_scalars((48, 5, 0.5)) is None  # none is compiled
    kernel(DEVICE)
    for stride, n, x in (
        (33, 5, 0.5), (1, 5, 0.5), (2**31, 5, 0.5), (32, 2**31, 0.5), (32, None, 0.5), (32, 5, 1),
    ):  # fmt: skip
        assert kernel.with_scalars((stride, n, x)) is None
    other = kernel.with_scalars((48, 1, 1.5))
    assert other is not None
    other(DEVICE)
    kernel(DEVICE)
    assert [run[2:] for run in compiled.launched] == [(48, 1, 1.5, "constant"), (32, 5, 0.5, "constant")]


def test_other_structures_of_scalars_for_a_compiled_kernel(monkeypatch):
    """Each field is looked at as a lone scalar is."""
    compiled, given = Compiled(), []

    class Kernel:
        params = tuple(SimpleNamespace(do_not_specialize=plain) for plain in (False, False, True, False))

        def __getitem__(self, grid):
            return lambda *arguments, **options: given.append(arguments) or compiled

    monkeypatch.setattr(torch_private, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    strides, lengths = Pair(Pair(32, 1), 16), Pair(5, 0.5)
    kernel = CachedLaunch(Kernel(), GRID[0], (strides, lengths), ("constant",), None, pointers=Pair)
    tensor = torch.empty(3)
    kernel(DEVICE, tensor, None)
    assert given == [(Pair(tensor, None), strides, lengths, "constant")]
    for other in (
        (Pair(Pair(33, 1), 16), lengths), (Pair(Pair(32, 2), 16), lengths), (strides, Pair(2**31, 0.5)),
        (strides, (5, 0.5)), (Pair(32, 16), lengths),
    ):  # fmt: skip
        assert kernel.with_scalars(other) is None
    scalars = (Pair(Pair(48, 1), 32), Pair(1, 1.5))
    other = kernel.with_scalars(scalars)
    assert other is not None
    other(DEVICE, tensor, 64)
    assert compiled.launched[-1][2:] == ((tensor.data_ptr(), 64), *scalars, "constant")


def test_a_compiled_kernel_is_published_with_its_device(monkeypatch):
    """Another thread may launch as soon as ``takes_addresses`` says so."""
    indices = []

    class Watched(CachedLaunch):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name in ("_run", "_index") and vars(self).get("_run") is not None:
                indices.append(self._index)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: Compiled()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    Watched(Kernel(), GRID[0], (5,), (), None)(DEVICE, torch.empty(3))
    assert indices == [DEVICE.index]


class SeenBy:
    """A view that makes a descriptor which says what it is of."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape

    def of(self, tensor: torch.Tensor | int) -> tuple[int, list[int]]:
        return tensor if type(tensor) is int else tensor.data_ptr(), self.shape


def test_a_tensor_is_described_by_its_address():
    """Memory that is no tensor: a part of a workspace."""
    tensor = torch.empty(4, 16, dtype=torch.bfloat16)
    view = View([4, 16], [16, 1], [2, 16], torch.bfloat16)
    by_tensor, by_address = view.of(tensor), view.of(tensor.data_ptr())
    assert by_address.base.data_ptr() == by_tensor.base.data_ptr()
    assert {**vars(by_address), "base": None} == {**vars(by_tensor), "base": None}


def test_tensor_maps_of_more_addresses_than_are_kept_are_mostly_found():
    encoded = []
    maps = direct_launch.TensorMaps(
        SeenBy([1]), lambda descriptor: encoded.append(descriptor) or [descriptor]
    )
    room = maps.LIMIT_BYTES // maps.ENTRY_BYTES
    assert room >= 65
    for _ in range(100):
        for address in range(room + 1):
            assert maps[address] == (address, [1])
            assert len(maps) <= room
    assert len(encoded) < 0.05 * 100 * (room + 1)


def test_rows_between_sequences():
    """A dimension of one row may have any stride."""
    for shape, rows in (((3, 1, 2, 64), 1), ((3, 5, 1, 64), 5), ((1, 5, 2, 64), 0), ((15, 2, 64), 0)):
        assert tma.rows_between_sequences(torch.empty(shape)) == rows, shape
