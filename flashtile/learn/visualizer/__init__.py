"""The interactive page: recordings of :mod:`flashtile.algorithms`, played in a browser.

``settings`` lists the runs, ``recording`` records them, ``packing`` compresses them and ``page`` writes one
self-contained HTML file. Its numbers come from recorded runs. The page computes runs of at most 64 tokens
itself; a test compares them event by event with :mod:`flashtile.algorithms`.
"""
