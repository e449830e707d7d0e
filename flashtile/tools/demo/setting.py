"""Setting of the demo: the machine, and the backend that serves each kind of call on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile import explain
from flashtile.hardware import machine
from flashtile.learn.io_model.tables import format_bytes


@dataclass(frozen=True)
class ServedCall:
    """Backend and configuration of one kind of call, from ``flashtile.explain``."""

    call: str
    backend: str | None
    config: str
    reasons_against: dict[str, str]


@dataclass(frozen=True)
class Setting:
    """Machine and served calls; ``device`` is the one in use, ``devices`` are all that torch can use."""

    device: str
    dtype: str
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    served: list[ServedCall]

    @property
    def device_name(self) -> str:
        index = "cuda:0" if self.device == "cuda" else self.device
        return next((d["name"] for d in self.devices if d["device"] == index), self.device)

    def machine_lines(self) -> list[str]:
        """Describe each device with its size, and the versions."""
        lines = []
        for d in self.devices:
            size = f"{d['cores']} cores" if "cores" in d else f"{d['sm_count']} SMs"
            memory = [] if d["memory_bytes"] is None else [format_bytes(d["memory_bytes"])]
            lines.append(f"{d['device']}: {', '.join([d['name'], d['capability'], size, *memory])}")
        return [*lines, ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)]

    def served_lines(self) -> list[str]:
        """Describe which backend serves each call, and every reason against other backends once."""
        lines = [
            f"{call.call}, {self.dtype} on {self.device}: served by {call.backend}" for call in self.served
        ]
        against = {reason for call in self.served for reason in call.reasons_against.items()}
        return lines + [f"not by {name}: {reason}" for name, reason in sorted(against)]


def natural_dtype(device: torch.device) -> torch.dtype:
    """Return the usual dtype of a device: float32 on a CPU; on a GPU bfloat16 if supported, else float16."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def inspect_setting(device: torch.device, dtype: torch.dtype) -> Setting:
    """Describe the machine and ask dispatch about a causal call, and about one with every option set."""
    q = torch.empty(1, 1024, 8, 64, dtype=dtype, device=device)
    slopes = torch.ones(8, device=device)
    every: dict[str, Any] = {"window_size": (256, 0), "softcap": 30.0, "alibi_slopes": slopes}
    served = []
    for call, options in (("causal", {}), ("causal, window, soft-cap, ALiBi", every)):
        found = explain(q, q, q, causal=True, **options)
        served.append(ServedCall(call, found.backend, str(found.config), found.reasons_against))
    name = str(dtype).removeprefix("torch.")
    return Setting(str(device), name, machine.versions(), machine.devices(), served)
