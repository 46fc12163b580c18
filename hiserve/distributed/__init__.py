"""Ranks that compute one model together: their shards, and the exchanges between them."""
