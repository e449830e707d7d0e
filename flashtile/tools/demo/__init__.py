"""``flashtile demo``: exactness, speed, memory and a training run on this machine, in one report."""
