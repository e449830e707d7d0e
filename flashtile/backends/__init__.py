"""Backends that compute calls, one package each, imported by ``flashtile.dispatch`` when needed."""
