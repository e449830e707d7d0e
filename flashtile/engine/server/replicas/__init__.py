"""Data parallelism: several servers of the same model in processes of their own, behind one address."""
