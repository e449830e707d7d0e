"""Frozen descriptions of calls, their options and memory layouts.

They import no other package of flashtile.
"""
