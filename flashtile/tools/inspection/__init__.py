"""Every kernel configuration, compiled ahead of time: the cases, and reports on their binaries."""
