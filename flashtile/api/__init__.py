"""The public functions: normalise the arguments, check them, and run the operation."""
