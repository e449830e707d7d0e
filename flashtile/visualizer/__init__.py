"""The interactive page: recordings of :mod:`flashtile.algorithms`, played in a browser.

``settings`` says what is recorded, ``recording`` runs it, ``packing`` makes it small and ``page`` writes one
HTML file that needs nothing else. The numbers on it are of recorded runs; runs of at most 64 tokens the page
makes itself, which a test compares event by event with :mod:`flashtile.algorithms`.
"""
