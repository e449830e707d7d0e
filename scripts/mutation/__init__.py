"""Mutation testing: plants faults in the package and finds out whether the tests of their lines fail."""
