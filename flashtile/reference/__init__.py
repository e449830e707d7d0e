"""Standard attention and its kin in plain PyTorch: the oracles of the tests."""
