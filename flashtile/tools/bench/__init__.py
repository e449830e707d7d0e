"""Benchmarks: workloads by name, contestants, a correctness check ("gate") before any timing, and reports."""
