"""The commands of ``flashtile``, one module each; they need the extras of ``flashtile[cli]``."""
