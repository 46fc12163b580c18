"""``hiserve serve`` for agents: what a reply must be is forced by a regex, so that any model calls tools.

Run as ``python -m tests.clients.forcing CALLS RECORD serve ...``. CALLS is a JSON object of arguments by tool. The first of them that
a conversation offers and has not called yet is called; then the reply is words. Bodies reach the server as they came; each is written
to RECORD, one JSON object a line, with its status and the text that was forced.
"""

from __future__ import annotations

import json
import re
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiserve.cli import main
from hiserve.commands import serve
from hiserve.grammar import bounds
from hiserve.grammar.tools import ToolGrammars
from hiserve.models.model_config import NANO, find_model
from hiserve.server import conversations
from hiserve.server.request.grammar_fields import Constraint
from hiserve.text.conversation import Call, Conversation
from tests.e2e.live import Live
from tests.helpers.checkpoint_folder import folder
from tests.helpers.reply_formats import TEMPLATES

CONTEXT, PAGE = 65_536, 16
TEMPLATE = ("--chat-template", str(TEMPLATES / "hermes.jinja"), "--reply-format", "hermes")
THOUGHT = "<think>\nso it is\n</think>\n\n"
WORDS, LAST = "Let me see.", "It is done."
_entry: ContextVar[dict[str, Any]] = ContextVar("entry")


class Counts(NamedTuple):
    """Tokens of one reply."""

    prompt: int
    cached: int
    generated: int


def long_model(place: Path) -> tuple[str, ...]:
    """Writes a checkpoint without weights: two small layers, a long context, the embedded model's tokenizer.

    Returns:
        Its options of ``hiserve serve``.
    """
    place.mkdir()
    own = find_model(NANO)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": CONTEXT}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (place / name).write_bytes((own / name).read_bytes())
    folder(place, **(json.loads((own / "config.json").read_text()) | sizes | more))
    return str(place), "--debug", "--load-format", "dummy", "--spec", "off", "--host-cache-gib", "0"


def reply_to(chat: Conversation, calls: dict[str, Any]) -> str | None:
    """Returns the next reply; None where one of the offered tools must be called, and none of these is left.

    Its call has white space that clients do not return.
    """
    made = [part.name for turn in chat.turns for part in turn.parts if isinstance(part, Call)]
    said = "".join([turn.text for turn in chat.turns if turn.role == "assistant"])
    made += [name for name in calls if f"'name': '{name}'" in said]  # smolagents sends calls back as text
    names = {tool["function"]["name"] for tool in chat.tools or []}
    following = next((name for name in calls if name in names and name not in made), None)
    if following is None:
        return None if chat.choice.is_required else (THOUGHT if names else "") + LAST
    arguments = json.dumps(calls[following], separators=(",  ", ":   "))
    call = f'<tool_call>\n{{"name": "{following}", "arguments": {arguments}}}\n</tool_call>'
    return call if chat.choice.is_required else f"{THOUGHT}{WORDS}\n{call}"


def counts(live: Live) -> list[Counts]:
    """Tokens of each reply, in the order in which they ended: the server logs them."""
    live.wait_idle()
    found = re.findall(r"(\d+) prompt tokens, (\d+) cached, (\d+) generated", live.log.read_text())
    return [Counts(*map(int, each)) for each in found]


def check_step(first: Counts, second: Counts) -> None:
    """A step of an agent computes what is new, and two pages at most."""
    new = second.prompt - first.prompt - first.generated
    assert 0 < second.prompt - second.cached <= new + 2 * PAGE, f"{first}, {second}"


class Recorder:
    """Writes down every request."""

    def __init__(self, app: ASGIApp, record: Path) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        raw, status = b"", 0

        async def take() -> Message:
            nonlocal raw
            message = await receive()
            raw += message.get("body", b"")
            return message

        async def give(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        entry = {"path": scope.get("path", ""), "reply": ""}
        _entry.set(entry)
        await self._app(scope, take, give)
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            entry |= {"query": scope["query_string"].decode(), "headers": headers, "status": status}
            with self._record.open("a") as sink:
                sink.write(json.dumps(entry | {"body": json.loads(raw)}) + "\n")


def run(calls: dict[str, Any], record: Path, *command: str) -> int:
    """Runs ``hiserve`` so."""
    build, real = serve.build_app, conversations.of_chat

    def build_app(*args: Any, **fields: Any) -> Any:
        app = build(*args, **fields)
        app.add_middleware(Recorder, record=record)
        return app

    def of_chat(
        constraint: Constraint | None, grammars: ToolGrammars, chat: Conversation, *more: Any
    ) -> Constraint | None:
        asked, text = real(constraint, grammars, chat, *more), reply_to(chat, calls)
        if constraint is not None or text is None:
            return asked
        _entry.get()["reply"] = text
        return Constraint(bounds.regex(re.escape(text), "forced"), "forced")

    serve.build_app, conversations.of_chat = build_app, of_chat
    return main(command)


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
