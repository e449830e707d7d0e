"""``flashtile info``: versions, devices, and the dtypes that each backend serves on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashtile.version import installed_version

if TYPE_CHECKING:
    import torch


def info() -> None:
    """Print versions, devices, and the dtypes that each backend serves on each device."""
    console = Console()
    console.print(_versions(), _devices(), _backends())
    for line in _compiled():
        console.print(line, markup=False, soft_wrap=True)


def _compiled() -> list[str]:
    """Describe the folders of compiled kernels in use."""
    if installed_version("triton") is None:
        return []
    from flashtile.backends.common.kernel_store import in_use

    return [
        f"compiled kernels: {folder.path}, Triton {folder.triton}, "
        + ", ".join(f"{count} for {arch}" for arch, count in folder.archs.items())
        for folder in in_use()
    ]


def _versions() -> Table:
    from flashtile.hardware import machine

    table = Table(title="versions", title_justify="left", show_header=False)
    for name, version in machine.versions().items():
        table.add_row(name, version or "-")
    return table


def _devices() -> Table:
    from flashtile.hardware import machine

    headings = ("device", "name", "capability", "memory", "size")
    table = Table(*headings, title="devices", title_justify="left")
    for device in machine.devices():
        memory = device["memory_bytes"]
        sms = device.get("sm_count")
        size = f"{device['cores']} cores, {device['threads']} threads" if sms is None else f"{sms} SMs"
        gigabytes = "-" if memory is None else f"{memory / 2**30:.1f} GiB"
        table.add_row(device["device"], escape(device["name"]), device["capability"], gigabytes, size)
    return table


def _backends() -> Table:
    import torch

    from flashtile.hardware import machine
    from flashtile.problems.common import PREFERENCE

    headings = ("backend", "device", "serves", "does not serve")
    table = Table(*headings, title="backends, in order of preference", title_justify="left")
    for name in PREFERENCE:
        for device in machine.devices():
            served, reasons = _served(name, torch.device(device["device"]))
            refused = "\n".join(f"{', '.join(dtypes)}: {reason}" for reason, dtypes in reasons.items())
            table.add_row(name, device["device"], ", ".join(served) or "-", escape(refused))
    return table


def _served(name: str, device: torch.device) -> tuple[list[str], dict[str, list[str]]]:
    """Return (served, reasons) for a backend and a plain attention call.

    ``served`` are the dtypes in which the backend computes the call. ``reasons`` maps each reason for a
    refusal to the dtypes that the backend refuses for it.
    """
    import torch

    from flashtile.op.selection import load_part
    from flashtile.operators.attention import FORWARD
    from flashtile.problems.attention import Problem
    from flashtile.problems.common import DTYPES

    served: list[str] = []
    reasons: dict[str, list[str]] = {}
    try:
        backend = load_part(name, FORWARD)
    except ImportError as error:
        return served, {f"cannot be imported: {error}": ["any dtype"]}
    for dtype in DTYPES:
        q = torch.empty((1, 16, 1, 64), dtype=dtype, device=device)
        reason = backend.reason_against(Problem.from_tensors(q, q, q), explicit=True)
        same = served if reason is None else reasons.setdefault(reason, [])
        same.append(str(dtype).removeprefix("torch."))
    return served, reasons
