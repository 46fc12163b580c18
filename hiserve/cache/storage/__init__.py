"""Where the bytes of a page lie (tensors)."""
