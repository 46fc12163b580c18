"""What every error must look like to a client, and must not show."""

from __future__ import annotations

import json
import re

MAX_MESSAGE_CHARS = 300
MAX_PARAM_CHARS = 150
TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
# What no client should read: Python, and where things are.
INTERNAL = re.compile(
    r'Traceback|File "|<class|<function| object at |0x[0-9a-f]{8}|\b[A-Z]\w+(Error|Exception)\b|codec'
    r"|/(work|usr|home|root|tmp|opt)/|\.py\b|\bsys\.|NoneType|\bTrue\b|\bFalse\b|\bNone\b|self"
)


def fault_of_error(status: int, body: bytes) -> str | None:
    """Says what is wrong with an error's body, if something is."""
    parsed = json.loads(body)
    if set(parsed) != {"error"} or set(parsed["error"]) != {"message", "type", "param", "code"}:
        return f"another shape: {body[:200]!r}"
    error = parsed["error"]
    if error["type"] != TYPES.get(status, "invalid_request_error"):
        return f"type of {error}"
    if not 0 < len(error["message"]) <= MAX_MESSAGE_CHARS or len(error["param"] or "") > MAX_PARAM_CHARS:
        return f"a message of {len(error['message'])} characters: {error['message'][:200]}"
    found = INTERNAL.search(error["message"])
    return f"{found[0]!r} is nothing for a client: {error}" if found else None
