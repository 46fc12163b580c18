"""Programs of others against a live server, unchanged; `make test-clients` runs the heavy ones."""
