"""Backends that compute calls, one package each, imported by ``flashtile.op.selection`` when needed."""
