"""The body of a request and the fields that several protocols share."""
