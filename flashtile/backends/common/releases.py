"""Releases of torch and Triton with which the kernels run."""

from __future__ import annotations

import functools
import importlib.util
import re

import torch

from flashtile.backends.common.device import Target

PAIRS = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
"""Releases of torch that flashtile takes, oldest first, with the release of Triton that each brings."""


def reason_of_releases(device: torch.device | Target) -> str | None:
    """Return why the installed torch and Triton do not run kernels on the device, or None if they do.

    Only for a GPU of this machine are the releases compared with :data:`PAIRS`. A torch that is newer than
    the table is taken, because only Triton compiles the kernels.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if isinstance(device, Target) or device.type != "cuda":
        return None
    import triton

    return _reason_of_versions(str(torch.__version__), triton.__version__)


@functools.cache
def _reason_of_versions(torch_version: str, triton_version: str) -> str | None:
    (oldest, *_), (first, *_, last) = PAIRS, PAIRS.values()
    torch_fits = _number(torch_version) >= _number(oldest)
    triton_fits = _number(first) <= _number(triton_version) <= _number(last)
    if torch_fits and triton_fits:
        return None
    return (
        f"it needs torch {oldest} or newer and Triton {first} to {last}, "
        f"this is torch {torch_version} with Triton {triton_version} (each torch brings its own Triton)"
    )


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (2, 15) for "2.15.0+cu132"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
