"""Which page holds which prefix (integers only)."""
