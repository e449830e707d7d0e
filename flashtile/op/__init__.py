"""The machinery that all operations share, between the public functions and the kernels."""
