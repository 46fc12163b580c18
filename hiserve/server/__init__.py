"""The HTTP server: one room for each protocol, on the rooms that all protocols share."""
