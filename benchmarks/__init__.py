"""Benchmarks of flashtile, for use in a checkout: ``python -m benchmarks``, and single measurements."""
