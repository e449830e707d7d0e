"""Data parallelism: several server processes with the same model, behind one address."""
