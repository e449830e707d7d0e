"""One operation: what attention, decoding and FP8 share between their front doors and their kernels."""
