"""Decides how: the planning loop over the cache, and the executor that runs its plans."""
