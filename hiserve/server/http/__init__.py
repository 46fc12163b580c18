"""A client's connection: keys, bounds on requests, errors, events."""
