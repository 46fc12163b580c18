"""What a user gets who sets nothing, beside an engine in the caller's process without a host tier."""
