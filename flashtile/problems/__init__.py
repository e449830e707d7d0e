"""Frozen descriptions of calls, their options and layouts. They import no other package."""
