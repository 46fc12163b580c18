"""Messages between processes, their encoding, and the sockets that carry them."""
