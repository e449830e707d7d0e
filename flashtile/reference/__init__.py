"""Standard attention and related functions in plain PyTorch, with which tests compare results."""
