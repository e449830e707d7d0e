"""Commands and what they run: the benchmark, the demonstration, and every `flashtile` command."""
