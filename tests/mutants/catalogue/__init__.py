"""One module a room, each with a list ``MUTANTS``."""
