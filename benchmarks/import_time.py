"""How long ``import flashtile`` takes beyond torch.

python benchmarks/import_time.py [processes]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

IMPORT = """
import time, torch
start = time.perf_counter()
import flashtile
print(1e3 * (time.perf_counter() - start))
"""


def import_milliseconds() -> float:
    """Of a new process."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    times = [import_milliseconds() for _ in range(processes)]
    median, least = statistics.median(times), min(times)
    print(f"import flashtile: {median:.1f} ms, at least {least:.1f} ms (of {processes})")


if __name__ == "__main__":
    main()
