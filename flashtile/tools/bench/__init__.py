"""Benchmarks: named workloads, contestants, a correctness gate before any timing, and reports."""
