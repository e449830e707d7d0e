"""Standard attention and related functions in plain PyTorch, to which tests compare."""
