"""From logits to the next token, keyed by position."""
