"""Products of float32 in float32, independent of the precision that torch is set to.

``torch.set_float32_matmul_precision("medium")`` rounds the factors of such products to bfloat16. They also
occur in calls of 16-bit tensors, whose bounds of error assume exact factors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flashtile.torch_private import matmul_precision, set_matmul_precision

EXACT = "ieee"

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
                _before = matmul_precision()
                if _before != EXACT:
                    set_matmul_precision(EXACT)
            _running += 1
        try:
            return launch(*arguments)
        finally:
            with _lock:
                _running -= 1
                if _running == 0 and _before != EXACT:
                    set_matmul_precision(_before)

    return run
