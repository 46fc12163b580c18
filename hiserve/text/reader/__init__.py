"""The tokens of a reply to its text, thoughts, content and calls."""
