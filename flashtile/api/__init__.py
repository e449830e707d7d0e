"""The public functions: normalise the arguments, check them, run the operation."""
