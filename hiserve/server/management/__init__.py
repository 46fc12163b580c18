"""Endpoints about the server: health, metrics, caches, information, schema, pages."""
