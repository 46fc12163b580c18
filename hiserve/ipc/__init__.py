"""What processes say to each other, how it is encoded, and the sockets it travels on."""
