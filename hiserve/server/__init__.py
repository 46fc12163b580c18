"""The HTTP server: one package for each protocol, over the packages that all protocols share."""
