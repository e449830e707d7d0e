"""Declarations of the operations: tensors, options, checks, derivatives."""
