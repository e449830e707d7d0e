"""Cards and their limits, this machine, the shapes of calls and the measured tables."""
