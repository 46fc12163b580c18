"""A small trained model and its draft heads inside larger shapes: what they say is the same, what they cost is not."""
