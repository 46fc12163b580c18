"""The metrics of the API process and the engine."""
