"""The interactive page: recordings of :mod:`flashtile.algorithms`, played in a browser.

``settings`` says what is recorded, ``recording`` runs it, ``packing`` makes it small and ``page`` writes one
HTML file that needs nothing else. The page computes no attention: every number on it is of a recorded run.
"""
