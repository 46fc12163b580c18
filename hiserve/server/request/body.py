"""Request bodies: bounded in size, parsed in the event loop if small, in a helper process if large."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiserve.errors import TooLargeError
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import cancel_on_disconnect
from hiserve.server.request.known_fields import check_fields, check_model, known_to
from hiserve.text.body.chat import ChatFields
from hiserve.text.body.parser import Sizes, is_quick, parse_body
from hiserve.text.helpers.pool import HelperPool

# Of a text, or of a conversation. Encoding this number takes a thread a second or two, in which others wait.
MAX_CHARS = 4 * 2**20


class Body(NamedTuple):
    """The form of a request's body, a JSON object.

    Attributes:
        name: Name of its schema.
        types: Types with its fields; each reads its own.
        inner: Types of objects in it whose other fields are refused like its own.
        either: Fields of which exactly one must be given.
        ignores_others: Ignore the fields that no type has; otherwise those that would change the answer are refused.
    """

    name: str
    types: tuple[type[msgspec.Struct], ...]
    inner: tuple[type[msgspec.Struct], ...] = ()
    either: tuple[str, ...] = ()
    ignores_others: bool = False


class BodyLimit:
    """Refuses bodies over the limit, before they are in memory.

    An announced length over the limit is refused at once. A body in chunks, or longer than announced, is refused at the
    chunk that exceeds the limit.

    Args:
        app: The application that gets the requests.
        max_bytes: Largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and counts the bytes of its body.

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


class BodyReader:
    """Parses bodies and checks their fields.

    Args:
        helpers: Parses large bodies.
        sizes: Bounds of token ids and prompts.
        model: Name of the served model.
        is_strict: Refuse unknown fields.
    """

    def __init__(self, helpers: HelperPool, sizes: Sizes, model: str, *, is_strict: bool) -> None:
        self._helpers = helpers
        self._sizes = sizes
        self._model = model
        self._is_strict = is_strict

    async def read(self, request: Request, form: Body) -> dict[str, Any]:
        """Returns the JSON object of a request's body; token ids of a large one are arrays, int32 ``[n]``.

        Args:
            request: The request.
            form: The form of its body.

        Raises:
            NotFoundError: The body names another model.
            RequestError: The body is malformed, larger than any request can be, or has an unsupported field.
            ClientDisconnect: The client closed the connection.
        """
        raw = await request.body()
        if is_quick(raw):
            body = parse_body(raw)
        else:
            is_chat = ChatFields in form.types
            slimming = self._helpers.slim(raw, self._sizes, caller_of(request).number, is_chat=is_chat)
            body = await cancel_on_disconnect(request.receive, slimming)
        if not form.ignores_others:
            check_model(body, self._model)
            self.check(body, *form.types)
        return body

    def check(self, fields: dict[str, Any], *kinds: type[msgspec.Struct]) -> None:
        """Refuses fields that would change the reply and are not supported; if strict, also unknown ones.

        Raises:
            RequestError: There is such a field.
        """
        check_fields(fields, known_to(*kinds), is_strict=self._is_strict)
