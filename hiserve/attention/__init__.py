"""Attention backends over a paged KV cache."""
