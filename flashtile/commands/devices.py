"""The ``--device`` option."""

from __future__ import annotations

import torch
import typer


def parse_device(name: str | None) -> torch.device:
    """The device of that name, a GPU with its index; None is the first GPU, or the CPU where there is none.

    Raises:
        typer.BadParameter: not the name of a device that is here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise typer.BadParameter(f"device {name!r} is not here: torch finds {count} CUDA devices")
    return torch.device("cuda", index)
