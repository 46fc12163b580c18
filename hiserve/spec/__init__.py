"""Proposers of drafts, and how many of them a step verifies."""
