"""What computes a call: one package a backend, imported by ``flashtile.dispatch`` when it is asked for."""
