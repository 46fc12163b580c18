"""The choices of a reply, from the engine's tokens to the forms that several protocols share."""
