"""Integrations into other libraries. Each changes its library only when its function is called."""
