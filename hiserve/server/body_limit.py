"""What a request may cost before it is understood: the size of its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiserve.errors import TooLargeError


class BodyLimit:
    """Refuses bodies over the limit, before they are in memory.

    A length that is announced is refused at once. A body that comes in chunks, or is longer than announced, is
    refused at the chunk that exceeds the limit.

    Args:
        app: What is protected.
        max_bytes: Largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, its body counted.

        Raises:
            TooLargeError: The body exceeds the limit.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit():
            self._check(int(announced))
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, receive_counted, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise TooLargeError(
                f"the body is larger than {self._max_bytes} bytes. Send less, or raise --max-request-bytes."
            )
