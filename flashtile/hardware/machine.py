"""Software and hardware of this machine, for ``flashtile info`` and for the records of measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from flashtile.version import __version__, installed_version


def versions() -> dict[str, str | None]:
    """Return the versions of software that affects measurements, by name. None means not installed.

    ``cuda`` and ``cudnn`` are the versions that torch uses.

    Examples:
        >>> flashtile.machine.versions()["torch"] == torch.__version__
        True
    """
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "flashtile": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": _driver_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def devices() -> list[dict[str, Any]]:
    """List every device that torch can use: GPUs with capability, memory and SM count, and the CPU."""
    gpus = [describe_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [*gpus, describe_device(torch.device("cpu"))]


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return a device's name, capability, memory in bytes, and number of SMs (GPU) or cores (CPU).

    Examples:
        >>> flashtile.machine.describe_device(torch.device("cpu"))["cores"] >= 1
        True
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": str(device),
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "sm_count": properties.multi_processor_count,
        }
    return {
        "device": "cpu",
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": _main_memory(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
    }


def free_memory() -> int | None:
    """Return the number of bytes that a new process could allocate without swapping; None if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def find_device(name: str | None) -> torch.device:
    """Return the device with this name. If a GPU's name has no index, the result is the first GPU.

    For None, the result is the first GPU, or the CPU if there is no GPU.

    Raises:
        ValueError: there is no such device.

    Examples:
        >>> flashtile.machine.find_device("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device must be one of the {count} CUDA devices that torch finds, got {name!r}")
    return torch.device("cuda", index)


def _driver_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (subprocess.SubprocessError, OSError):
        return None
    return found[0] if found else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _main_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
