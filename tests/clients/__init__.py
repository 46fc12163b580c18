"""Programs of others against a live server, unchanged; the heavy ones run behind `make test-clients`."""
