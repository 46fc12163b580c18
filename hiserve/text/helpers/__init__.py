"""Processes and threads that keep long work off the event loop."""
