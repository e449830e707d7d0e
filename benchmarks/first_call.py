"""How long a process waits for its first call when the kernel lies in Triton's disk cache.

    python benchmarks/first_call.py [processes]

New processes on a GPU, in turn without and with the key that ``flashtile.backends.common.kernel_cache``
keeps, in the user's own cache. PyTorch, CUDA and Triton are up before the clock starts.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from triton import knobs

CALL = """
import time
import torch, triton, flashtile
q = torch.randn(2, 1024, 8, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
flashtile.flash_attn_func(q, q, q, causal=True, backend={backend!r})
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(backend: str | None) -> float:
    """Seconds of the first call of a new process."""
    command = [sys.executable, "-c", CALL.format(backend=backend)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("it needs a GPU: without one there is no first call to wait for")
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for backend in ("portable", None):
        first_call(backend)  # which fills the cache
        without, with_key = [], []
        for _ in range(processes):
            shutil.rmtree(Path(knobs.cache.dir) / "flashtile", ignore_errors=True)
            without.append(first_call(backend))
            with_key.append(first_call(backend))
        print(
            f"{backend or 'the preferred backend'}: {statistics.median(without):.3f} s without the key, "
            f"{statistics.median(with_key):.3f} s with it (medians of {processes})",
            flush=True,
        )


if __name__ == "__main__":
    main()
