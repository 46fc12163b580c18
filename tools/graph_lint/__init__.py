"""A linter of the hot path: code that would break a CUDA graph, or make a launch wait for the device."""
