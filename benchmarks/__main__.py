"""``python -m benchmarks``: compare flashtile with its peers on named workloads."""

from benchmarks.suite.command import main

if __name__ == "__main__":
    main()
