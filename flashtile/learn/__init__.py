"""Material for learning how attention works: the papers' algorithms, an I/O model, the interactive page."""
