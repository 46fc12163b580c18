"""Recorded dialogues: every message of the user is a request with the history as it was recorded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from hiserve.bench.datasets.files import read_lines
from hiserve.bench.target import Counter
from hiserve.bench.workload import Messages, Turn, Workload
from hiserve.errors import ConfigError

SAMPLED_DIALOGUES = 20


class Message(msgspec.Struct):
    """One message of a dialogue."""

    role: str
    content: str


class Dialogue(msgspec.Struct):
    """One line of the file."""

    messages: list[Message]

    def as_sent(self) -> Messages:
        """Returns the messages as the body of a request has them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


async def chats(path: Path, *, counter: Counter, num_prompts: int | None, output_length: int | None) -> Workload:
    """Returns one session for each dialogue; its history grows turn by turn.

    Args:
        path: ``{"messages": [{"role", "content"}, ...]}`` a line.
        counter: Measures recorded replies; a reply may be as long as the recorded one.
        num_prompts: Most requests, or None for all.
        output_length: Longest reply, instead of the recorded one's length.

    Raises:
        ConfigError: The file cannot be read or has no message of a user.
    """
    sessions: list[list[Turn]] = []
    room = num_prompts
    for dialogue in read_lines(path, Dialogue, "chats"):
        if room == 0:
            break
        session: list[Turn] = []
        messages = dialogue.as_sent()
        for index, message in enumerate(messages):
            if message["role"] != "user" or len(session) == room:
                continue
            reply = messages[index + 1]["content"] if index + 1 < len(messages) else ""
            max_tokens = output_length or max(1, await counter.count(reply))
            session.append(Turn(prompt=messages[: index + 1], max_tokens=max_tokens))
        if session:
            sessions.append(session)
            room = None if room is None else room - len(session)
    if not sessions:
        raise ConfigError(f"--path {path} has no message of a user.", param="path")
    return Workload(name="chats", sessions=sessions)


def text_like_it(path: Path) -> str:
    """Returns some of the file's text, for measuring how many tokens such text has."""
    dialogues = islice(read_lines(path, Dialogue, "chats"), SAMPLED_DIALOGUES)
    return "\n".join(message.content for dialogue in dialogues for message in dialogue.messages)
