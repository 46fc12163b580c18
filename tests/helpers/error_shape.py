"""What every error must look like to a client, and must not show."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_MESSAGE_CHARS = 300
MAX_PARAM_CHARS = 150
TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}
# What no client should read: Python, and where things are.
INTERNAL = re.compile(
    r'Traceback|File "|<class|<function| object at |0x[0-9a-f]{8}|\b[A-Z]\w+(Error|Exception)\b|codec'
    r"|/(work|usr|home|root|tmp|opt)/|\.py\b|\bsys\.|NoneType|\bTrue\b|\bFalse\b|\bNone\b|self"
)


def fault_of_error(status: int, body: bytes) -> str | None:
    """Says what is wrong with an error's body, if something is."""
    parsed = json.loads(body)
    if parsed.get("type") == "error":
        return _fault_of_anthropics(status, parsed)
    if set(parsed) != {"error"} or set(parsed["error"]) != {"message", "type", "param", "code"}:
        return f"another shape: {body[:200]!r}"
    error = parsed["error"]
    if error["type"] != TYPES.get(status, "invalid_request_error"):
        return f"type of {error}"
    if len(error["param"] or "") > MAX_PARAM_CHARS:
        return f"a param of {len(error['param'])} characters: {error['param'][:200]}"
    return _fault_of_message(error["message"])


def _fault_of_anthropics(status: int, parsed: dict[str, Any]) -> str | None:
    error = parsed["error"]
    has_fields = set(parsed) == {"type", "error", "request_id"} and set(error) - {"details"} == {"type", "message"}
    if not has_fields or not parsed["request_id"]:
        return f"another shape: {parsed}"
    if error["type"] != ANTHROPICS.get(status, "invalid_request_error"):
        return f"type of {error}"
    return _fault_of_message(error["message"])


def _fault_of_message(message: str) -> str | None:
    if not 0 < len(message) <= MAX_MESSAGE_CHARS:
        return f"a message of {len(message)} characters: {message[:200]}"
    found = INTERNAL.search(message)
    return f"{found[0]!r} is nothing for a client: {message}" if found else None
