"""Decoding: attention of new queries over a key/value cache, dense or paged, and the cache's writing."""
