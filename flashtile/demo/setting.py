"""Where the demo runs: the machine, and the backend that serves each kind of call on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile import explain, machine


@dataclass(frozen=True)
class Served:
    """What one kind of call gets, from ``flashtile.explain``."""

    call: str
    backend: str | None
    config: str
    reasons_against: dict[str, str]


@dataclass(frozen=True)
class Setting:
    """``device`` is the one that the demo uses; ``devices`` are all that torch can use."""

    device: str
    dtype: str
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    served: list[Served]

    @property
    def device_name(self) -> str:
        index = "cuda:0" if self.device == "cuda" else self.device
        return next((d["name"] for d in self.devices if d["device"] == index), self.device)


def choose_device(name: str | None) -> torch.device:
    """The named device, or by default the GPU if there is one.

    Raises:
        ValueError: a name that torch does not know, a device that is neither, or a GPU that is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:<index>, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:<index>, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return device


def natural_dtype(device: torch.device) -> torch.dtype:
    """What one computes in there: float32 on a CPU, bfloat16 on a GPU that has it."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def inspect_setting(device: torch.device, dtype: torch.dtype) -> Setting:
    """Describe the machine and ask dispatch about a causal call, and about one with every option set."""
    q = torch.empty(1, 1024, 8, 64, dtype=dtype, device=device)
    slopes = torch.ones(8, device=device)
    calls: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "causal, window, soft-cap, ALiBi": {
            "causal": True,
            "window_size": (256, 0),
            "softcap": 30.0,
            "alibi_slopes": slopes,
        },
    }
    served = []
    for call, arguments in calls.items():
        found = explain(q, q, q, **arguments)
        served.append(Served(call, found.backend, str(found.config), found.reasons_against))
    name = str(dtype).removeprefix("torch.")
    return Setting(str(device), name, machine.versions(), machine.devices(), served)
