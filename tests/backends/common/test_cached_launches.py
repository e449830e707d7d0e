"""Cached launches: arguments in order, tensors by address, hooks of a profiler called when there are some."""

from __future__ import annotations

import contextvars
import gc
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs

from flashtile.backends import compat
from flashtile.backends.common import direct_launch
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tma import View

GRID = (7, 1, 1)
DEVICE = torch.device("cuda", 1)
Pair = namedtuple("Pair", "first second")


class Compiled:
    """What Triton hands back for a launch: its two ways to launch again.

    ``types`` are those of the kernel's arguments, a tuple for each structure.
    """

    function, packed_metadata = "function", "metadata"

    def __init__(self, *types: object) -> None:
        self.metadata: Any = None
        self.src = SimpleNamespace(signature=dict(enumerate(types)))
        self.direct: list[tuple] = []
        self.hooked: list[tuple] = []

    def run(self, *arguments: object) -> None:
        self.direct.append(arguments)
        self.on_launch()

    def on_launch(self) -> None:
        """A test may look at the world as a launch finds it."""

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments, stream: self.hooked.append((grid, stream, *arguments))


def test_tensors_go_by_address():
    compiled, tensor = Compiled(), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (tensor, None, tensor), (5, 0.5, "constant"))
    launch(11, (tensor, None, 1234))
    arguments = (tensor.data_ptr(), None, 1234, 5, 0.5, "constant")
    assert compiled.direct == [(*GRID, 11, "function", "metadata", None, None, None, *arguments)]
    assert compiled.hooked == []


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_addresses_go_in_a_structure(monkeypatch, hooked):
    compiled, a, b = Compiled(), torch.empty(3), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (a, b, None), (Pair(5, 6),), (SeenBy([3]),), Pair)
    if hooked:
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    launch(11, (a, b, None))
    arguments = ((a.data_ptr(), [3]), (b.data_ptr(), None), Pair(5, 6))
    if hooked:
        assert compiled.hooked == [(GRID, 11, *arguments)]
        assert isinstance(compiled.hooked[0][3], Pair)
    else:
        assert [run[9:] for run in compiled.direct] == [arguments]


class Recorder:
    """A launcher as Triton makes it of a signature. It keeps its launches by the types of their arguments."""

    def __init__(self, src: SimpleNamespace, launched: list[dict]) -> None:
        self.types = tuple(src.signature.values())
        self.launched = launched

    def __call__(self, *arguments: object) -> None:
        self.launched.append(dict(zip(self.types, arguments[9:], strict=True)))


@pytest.mark.parametrize("nested", [False, True])
def test_the_driver_gets_the_leaves_of_structures(nested):
    """A constant is a leaf even if it is a tuple."""
    a, b, fixed = torch.empty(3), torch.empty(3), (Pair(5, Pair(6, None)), (7, 8))
    compiled = Compiled("view", ("a", ("n", "b") if nested else "b"), ("x", ("y", "z")), "C")
    compiled.metadata = launched = []
    compiled.run = Recorder(compiled.src, [])
    second = (4, b.data_ptr()) if nested else b
    tensors = (a, a, second)
    launch = compat.launcher(compiled, GRID, tensors, fixed, (SeenBy([3]),), Pair)
    launch(11, tensors)
    other = launch.with_fixed((Pair(1, Pair(2, None)), (7, 8)))
    other(11, (b, b, second))
    first, then = launched
    leaves = {"a": a.data_ptr(), "b": b.data_ptr(), "x": 5, "y": 6, "z": None, "C": (7, 8)}
    leaves |= {"n": 4} if nested else {}
    assert first == {"view": (a.data_ptr(), [3]), **leaves}
    assert then == {"view": (b.data_ptr(), [3]), **leaves, "a": b.data_ptr(), "x": 1, "y": 2}


def test_a_deep_structure_may_change_between_launches():
    """Leaves of numbers are kept for the structure that they came from, those of addresses never."""
    compiled = Compiled((("a", ("b", "c")), ("*d", ("e", "f"))), "C")
    compiled.run = Recorder(compiled.src, [])
    compiled.metadata = launched = []
    numbers = (1, (2, 3)), (4, (5, 6)), (1, (2, 3))
    launch = compat.launcher(compiled, GRID, (numbers[0], (7, (8, 9))), ("constant",), (), Pair)
    addresses = (7, (8, 9)), (10, (11, 12)), (7, (8, 9)), (1, (1, 1))
    given = list(zip((numbers[0], *numbers), addresses, strict=True))
    for structures in given:
        launch(11, structures)
    flat = [(a, *b, c, *d, "constant") for (a, b), (c, d) in given]
    assert [tuple(run.values()) for run in launched] == flat


def test_structures_go_whole_where_triton_makes_launchers_differently():
    """The function that runs these kernels cannot be made of a signature."""
    compiled, a = Compiled(("a", "b"), ("x", "y"), "C"), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (a, None), (Pair(5, 6), "constant"), (), Pair)
    launch(11, (a, None))
    assert compiled.direct[0][9:] == ((a.data_ptr(), None), Pair(5, 6), "constant")


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_a_descriptor_may_be_absent(monkeypatch, hooked):
    """None stands in its place, and no tensor comes for it."""
    compiled, a, b = Compiled(), torch.empty(3), torch.empty(3)
    views = (None, SeenBy([3]), None)
    launch = compat.launcher(compiled, GRID, (a, b), (5,), views, Pair)
    if hooked:
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    launch(11, (b, a, None))
    arguments = (None, (b.data_ptr(), [3]), None, (a.data_ptr(), None), 5)
    assert (compiled.hooked[0][2:] if hooked else compiled.direct[0][9:]) == arguments


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(monkeypatch, name):
    compiled, tensor = Compiled(), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (tensor, None), (5,))
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    launch(11, (tensor, None))
    assert compiled.hooked == [(GRID, 11, tensor.data_ptr(), None, 5)]
    assert compiled.direct == []


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

    monkeypatch.setattr(compat, "cuda_device", lambda: current[0])
    monkeypatch.setattr(compat, "cuda_stream", lambda index: 100 + index)
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
    assert [run[3] for run in compiled.direct] == [101, 101]
    assert launched_on == [DEVICE.index, DEVICE.index]
    assert [run[9:] for run in compiled.direct] == [(tensor.data_ptr(), 4096, 5, "constant")] * 2


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
    monkeypatch.setattr(compat, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(compat, "cuda_stream", lambda index: 100 + index)
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
    assert len(compiled.direct) == (0 if is_direct else 1)


def test_other_scalars_for_a_compiled_kernel(monkeypatch):
    """Where Triton would compile the same: it tells integers apart by 1, multiples of 16 and 32 bits."""
    compiled = Compiled()

    class Kernel:
        params = tuple(SimpleNamespace(do_not_specialize=plain) for plain in (False, True, True, False))

        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled

    monkeypatch.setattr(compat, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(compat, "cuda_stream", lambda index: 7)
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
    assert [run[9:] for run in compiled.direct] == [(48, 1, 1.5, "constant"), (32, 5, 0.5, "constant")]


def test_other_structures_of_scalars_for_a_compiled_kernel(monkeypatch):
    """Each field is looked at as a lone scalar is."""
    compiled, given = Compiled(), []

    class Kernel:
        params = tuple(SimpleNamespace(do_not_specialize=plain) for plain in (False, False, True, False))

        def __getitem__(self, grid):
            return lambda *arguments, **options: given.append(arguments) or compiled

    monkeypatch.setattr(compat, "cuda_device", lambda: DEVICE.index)
    monkeypatch.setattr(compat, "cuda_stream", lambda index: 7)
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
    assert compiled.direct[-1][9:] == ((tensor.data_ptr(), 64), *scalars, "constant")


def test_whoever_sees_a_compiled_kernel_sees_its_device(monkeypatch):
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


def test_descriptors_without_a_known_triton_go_as_they_are():
    compiled, a, b = Compiled(), torch.empty(3), torch.empty(4)
    views = (SeenBy([3]), SeenBy([4]))
    launch = compat.launcher(compiled, GRID, (a, b, a, None), (5,), views)
    launch(11, (a, b, a, None))
    descriptors = [view.of(t) for view, t in zip(views, (a, b), strict=True)]
    assert compiled.direct[0][9:] == (*descriptors, a.data_ptr(), None, 5)


def test_tensor_maps_are_encoded_once_for_each_address(monkeypatch):
    """By Triton's own function around the launcher, and by ours instead: the driver gets the same."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    encoded, launched = [], []

    def encode(arg, metadata, *more):
        encoded.append(arg)
        return [f"map {arg} {metadata}", *arg[1]]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    signature = {"a": "tensordesc<fp16[1]>", "b": "tensordesc<fp16[1]>", "c": "*fp16", "d": "i32"}

    class Launcher:
        """Triton's, but for what comes before the kernel's arguments."""

        def __init__(self) -> None:
            metadata = [{"n": 0}, {"n": 1}]
            self.launch = driver.wrap_handle_tensordesc(lambda *a: launched.append(a), signature, metadata)

        def __call__(self, *arguments: object) -> None:
            base, kernel = arguments[:9], arguments[9:]
            if triton.__version__.startswith("3.6"):
                self.launch(*base, *[None] * 4, *kernel)
            else:
                self.launch(*base, kernel)

    compiled, views = Compiled(), (SeenBy([3]), SeenBy([4]))
    compiled.run = Launcher()
    a, b, c = (torch.empty(n) for n in (3, 4, 5))
    launch = compat.launcher(compiled, GRID, (a, b, c), (7,), views)
    shapes = (SeenBy([30]), SeenBy([40]))  # other ones, same kernel
    other = compat.launcher(compiled, GRID, (a, b, c), (7,), shapes)
    for _ in range(2):
        launch(11, (a, b, c))
        other(11, (a, b, c))
        launch(11, (b, a, c))
    keeps = triton.__version__.startswith(("3.6", "3.7"))
    assert len(encoded) == (6 if keeps else 12)
    own = launched.copy()
    for seen, tensors in ((views, (a, b)), ((SeenBy([30]), SeenBy([40])), (a, b)), (views, (b, a))):
        described = [view.of(t) for view, t in zip(seen, tensors, strict=True)]
        kernel = (compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*GRID, 11, *kernel, *described, c.data_ptr(), 7)
    assert [[list(x) if isinstance(x, tuple) else x for x in call] for call in own] == [
        [list(x) if isinstance(x, tuple) else x for x in call] for call in (launched[6:] * 2)
    ]


@pytest.mark.parametrize("scratch", [0, 64], ids=["no scratch", "scratch"])
def test_the_function_in_c_gets_what_triton_gives_it(scratch):
    """Without Triton's object around it, unless that allocates for each launch."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launched, calls = [], []

    class Launcher(driver.CudaLauncher):
        def __init__(self) -> None:
            self.launch = lambda *arguments: launched.append(arguments)
            self.num_ctas, self.launch_cooperative_grid, self.launch_pdl = 1, False, True
            self.global_scratch_size, self.global_scratch_align = scratch, 16
            self.profile_scratch_size, self.profile_scratch_align = 0, 1
            self.arg_annotations, self.kernel_signature = "annotations", "signature"

        def __call__(self, *arguments: object) -> None:
            calls.append(arguments)
            super().__call__(*arguments)

    def in_own_context() -> None:
        triton.set_allocator(lambda size, align, stream: (size, align, stream))
        launch = compat.launcher(compiled, GRID, (tensor, None), (5,))
        calls.clear()
        for stream in (11, 12):
            launch(stream, (tensor, None))
        keeps = triton.__version__.startswith(("3.6", "3.7"))
        assert len(calls) == (0 if keeps and not scratch else 2)
        kernel = (compiled.function, compiled.packed_metadata, None, None, None)
        for stream in (11, 12):
            compiled.run(*GRID, stream, *kernel, tensor.data_ptr(), None, 5)

    compiled, tensor = Compiled(), torch.empty(3)
    compiled.run = Launcher()
    contextvars.copy_context().run(in_own_context)
    assert len(launched) == 4
    assert launched[:2] == launched[2:]


def test_a_tensor_is_described_by_its_address():
    """Memory that is no tensor: a part of a workspace."""
    tensor = torch.empty(4, 16, dtype=torch.bfloat16)
    view = View([4, 16], [16, 1], [2, 16], torch.bfloat16)
    by_tensor, by_address = view.of(tensor), view.of(tensor.data_ptr())
    assert by_address.base.data_ptr() == by_tensor.base.data_ptr()
    assert {**vars(by_address), "base": None} == {**vars(by_tensor), "base": None}


def test_tensor_maps_of_more_addresses_than_are_kept_are_mostly_found():
    encoded = []
    maps = compat.TensorMaps(SeenBy([1]), lambda descriptor: encoded.append(descriptor) or [descriptor])
    room = maps.LIMIT_BYTES // maps.ENTRY_BYTES
    assert room >= 65
    for _ in range(100):
        for address in range(room + 1):
            assert maps[address] == (address, [1])
            assert len(maps) <= room
    assert len(encoded) < 0.05 * 100 * (room + 1)
