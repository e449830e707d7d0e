"""Products of float32 in float32, independent of the precision that torch is set to.

``torch.set_float32_matmul_precision("medium")`` rounds the factors of such products to bfloat16. They also
occur in calls of 16-bit tensors, whose bounds of error assume exact factors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

EXACT = "ieee"
_get = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
_set = functools.partial(torch._C._set_fp32_precision_setter, "mkldnn", "matmul")

_lock = threading.Lock()
_running = 0
_before = EXACT


def with_exact_products(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``launch``, run with exact products. The setting of the process is restored after it.

    Threads share the setting, so the last of the launches that run at the same time restores it.
    """

    def run(*arguments: Any) -> Any:
        global _running, _before
        with _lock:
            if _running == 0:
                _before = _get()
                if _before != EXACT:
                    _set(EXACT)
            _running += 1
        try:
            return launch(*arguments)
        finally:
            with _lock:
                _running -= 1
                if _running == 0 and _before != EXACT:
                    _set(_before)

    return run
