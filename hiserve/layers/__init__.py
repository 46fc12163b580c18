"""Building blocks of a decoder."""
