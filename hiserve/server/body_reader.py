"""Reads the bodies of requests: small ones here and now, large ones by a process of their own."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from hiserve.server.auth import caller_of
from hiserve.server.sse import cancel_on_disconnect
from hiserve.text.body_parser import Sizes, is_quick, parse_body
from hiserve.text.helper_pool import HelperPool


class BodyReader:
    """What bodies say.

    Args:
        helpers: Reads large ones.
        sizes: What token ids and prompts may be.
    """

    def __init__(self, helpers: HelperPool, sizes: Sizes) -> None:
        self._helpers = helpers
        self._sizes = sizes

    async def read(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object of a request's body; token ids of a large one are arrays, int32 ``[n]``.

        Raises:
            RequestError: It is malformed, or more than any request can be.
            ClientDisconnect: The client went away.
        """
        raw = await request.body()
        if is_quick(raw):
            return parse_body(raw)
        return await cancel_on_disconnect(
            request.receive, self._helpers.slim(raw, self._sizes, caller_of(request).number)
        )
