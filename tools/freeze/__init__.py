"""Records what the engine and its server do, so that a change of the code can be shown to change none of it."""
