"""Frozen descriptions of calls, their options and memory layouts. Imports no other package of flashtile."""
