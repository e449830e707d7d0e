"""Every `flashtile` command and what it runs, such as the demonstration."""
