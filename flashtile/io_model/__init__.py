"""What attention costs before anything runs: bytes, FLOPs, time floors and memory of a call on a card."""
