"""``flashtile demo``: exactness, speed, memory and a training run on the machine at hand, as one report."""
