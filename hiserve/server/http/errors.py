"""Errors, in the form of each protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from hiserve.errors import HiserveError

# Clients repeat a request that fails with 408, 409, 429 or 5xx.
CLIENT_CLOSED_REQUEST = 499
HEADERS = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "1"},
    500: {"x-should-retry": "false"},
    503: {"retry-after": "1"},
}


class ErrorFields(msgspec.Struct):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """Body of every error."""

    error: ErrorFields


class ErrorForm(NamedTuple):
    """The form of errors in one protocol.

    Attributes:
        kind: Type of the body.
        body: Returns the body by status, message, code, ``param`` and the id of the request.
        statuses: The protocol's own statuses, by the usual ones.
        id_header: A further header with the id of the request; empty for none.
    """

    kind: type[msgspec.Struct]
    body: Callable[[int, str, str, str | None, str], bytes]
    statuses: Mapping[int, int] = {}
    id_header: str = ""


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    """Returns ``{"error": {"message", "type", "param", "code"}}`` as JSON.

    Args:
        status: HTTP status; decides the type.
        message: For people. Characters that UTF-8 cannot encode are replaced.
        code: For programs.
        param: The request field at fault.
    """
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(Error(ErrorFields(printable(message), kind, param and printable(param), code)))


OPENAI = ErrorForm(Error, lambda status, message, code, param, _: error_body(status, message, code=code, param=param))


def error_response(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    retry_after_s: int | None = None,
    form: ErrorForm = OPENAI,
    request_id: str = "",
) -> Response:
    """Returns the error as a response, with the headers that go with its status.

    Args:
        status: As in ``error_body``, like the next three.
        message: For people.
        code: For programs.
        param: The request field at fault.
        retry_after_s: Seconds for ``retry-after``; the default is that of the status.
        form: Of the body.
        request_id: As ``form`` shows it.
    """
    body = form.body(status, message, code, param, request_id)
    headers = dict(HEADERS.get(status, {}))
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    shown = form.statuses.get(status, status)
    return Response(body, status_code=shown, headers=headers, media_type="application/json")


def failure_response(error: Exception, form: ErrorForm, request_id: str) -> Response:
    """Returns the error response for an exception."""
    status, message, code, param = describe(error)
    retry_after_s = error.retry_after_s if isinstance(error, HiserveError) else None
    return error_response(
        status, message, code=code, param=param, retry_after_s=retry_after_s, form=form, request_id=request_id
    )


def describe(error: Exception) -> tuple[int, str, str, str | None]:
    """Returns (status, message, code, param); a client does not get the message of an error that is our own fault."""
    if isinstance(error, HiserveError):
        return error.status, error.message, error.code, error.param
    return 500, "the server failed to answer this request.", "internal_error", None


def printable(text: str) -> str:
    """Returns a text with characters that UTF-8 cannot encode replaced."""
    return text.encode("utf-8", "replace").decode()
