"""Kept launches: arguments in order, tensors by address, hooks of a profiler called when there are some."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from flashtile.backends import compat
from flashtile.backends.portable.launch import KeptKernel

GRID = (7, 1, 1)
DEVICE = torch.device("cuda", 1)


class Compiled:
    """What Triton hands back for a launch: its two ways to launch again."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.direct: list[tuple] = []
        self.hooked: list[tuple] = []

    def run(self, *arguments: object) -> None:
        self.direct.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments, stream: self.hooked.append((grid, stream, *arguments))


def test_tensors_go_by_address():
    compiled, tensor = Compiled(), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (5, 0.5, "constant"))
    launch(11, (tensor, None, 1234))
    arguments = (tensor.data_ptr(), None, 1234, 5, 0.5, "constant")
    assert compiled.direct == [(*GRID, 11, "function", "metadata", None, None, None, *arguments)]
    assert compiled.hooked == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(monkeypatch, name):
    compiled, tensor = Compiled(), torch.empty(3)
    launch = compat.launcher(compiled, GRID, (5,))
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    launch(11, (tensor, None))
    assert compiled.hooked == [(GRID, 11, tensor.data_ptr(), None, 5)]
    assert compiled.direct == []


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

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    kernel = KeptKernel(Kernel(), GRID[0], (5,), ("constant",), None)
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
    assert [run[9:] for run in compiled.direct] == [(tensor.data_ptr(), 4096, 5, "constant")] * 2
