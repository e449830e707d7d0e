"""Benchmarks: workloads by name, contestants, a correctness check ("gate") before any timing, and reports.

A contestant is an implementation that is measured: flashtile, one of its backends, or another library.
"""
