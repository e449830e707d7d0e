"""Known GPUs and their limits, this machine, the shapes of calls, timing, and measured tables."""
