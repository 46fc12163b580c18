"""A soak: load and faults at a rate, and what was survived."""
