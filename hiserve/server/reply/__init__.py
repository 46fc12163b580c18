"""The choices of a reply, from the engine's tokens to the parts that several protocols share."""
