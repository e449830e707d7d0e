"""Integrations into other libraries. Importing this package changes no library; calling a function does."""
