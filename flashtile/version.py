"""Version of flashtile."""

__version__ = "0.2.0"
