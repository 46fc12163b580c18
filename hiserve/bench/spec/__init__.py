"""Speculation against plain decoding: what is accepted, what it costs, what it gains."""
