"""Compilation ahead of time: which calls a program makes, and the kernels for them on any GPU."""
