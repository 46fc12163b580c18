"""Permanent rows, step inputs, and the runners that execute a forward."""
