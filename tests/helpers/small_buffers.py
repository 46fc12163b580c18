"""``hiserve`` whose sockets buffer little, and which keeps little for readers that are slow. Takes its command line."""

from __future__ import annotations

import socket
import sys

from hiserve.cli import main
from hiserve.commands import serve

SEND_BYTES = 16_384
UNREAD_BYTES = 20_000


def bind(host: str, port: int) -> socket.socket:
    listener = roomy(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # the connections inherit it
    return listener


if __name__ == "__main__":
    roomy, serve.bind = serve.bind, bind
    serve.MAX_UNREAD_BYTES = UNREAD_BYTES
    sys.exit(main())
