"""The grammars of custom tools that the model only sees."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request

from hiserve.errors import RequestError
from hiserve.grammar.bounds import INVALID
from hiserve.grammar.tools import ToolSchema
from hiserve.grammar.vet import Vetting
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import cancel_on_disconnect

NOT_HELD = "the model sees the grammars of these tools, but they are not held"


async def check_shown(vetting: Vetting, request: Request, shown: Iterable[ToolSchema]) -> None:
    """Checks the grammars that the model only sees; one that takes too long to hold is sound.

    Args:
        vetting: Tries them.
        request: The request; its body must have been read.
        shown: The grammars, as in ``CustomTools.not_held``.

    Raises:
        RequestError: One is no grammar.
        OverloadedError: As ``Vetting.check``.
        ClientDisconnect: The client went away.
    """
    for grammar, param in shown:
        checking = vetting.check(grammar, param, caller=caller_of(request).number)
        try:
            await cancel_on_disconnect(request.receive, checking)
        except RequestError as refusal:
            if refusal.code == INVALID:
                raise
