"""Tokenizers, chat templates and tools for every format of replies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st
from tokenizers import AddedToken

from hiserve.core.request import FinishReason
from hiserve.text.reader.buffer import Event, EventLog, Kind
from hiserve.text.reader.formats import BY_NAME, FORMATS, ReplyFormat
from hiserve.text.reader.reader import Reader
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text

RUNNING, STOP = FinishReason.RUNNING, FinishReason.STOP
# Of deltas, the last of which takes the rest; some replies come in deltas of one size throughout.
SIZES = st.lists(st.integers(1, 6), max_size=30) | st.integers(1, 3).map(lambda size: [size] * 1000)
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
NAMES = [row.name for row in FORMATS if row.has_calls]
PARAMETERS = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "entries": {"type": "array"},
    "more": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": PARAMETERS}}}]


def marks_of(row: ReplyFormat) -> list[str]:
    """Everything that a format gives a meaning."""
    marks = [*row.thought, *row.section, *row.call, *row.name_ends, *row.name_prefixes, row.id_mark, *row.fence]
    marks += [*row.key, *row.value, row.end, *row.header, *row.header_starts, *row.header_marks, *row.message_ends]
    return sorted({mark for mark in marks if len(mark) > 1})


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())


@cache
def tokenizer_of(name: str, *, by_token: bool) -> Tokenizer:
    """A tokenizer in which marks are tokens of their own, or not."""
    backend = tiny_text.byte_level_backend()
    if by_token:
        marks = [mark for mark in marks_of(BY_NAME[name]) if mark[0] in "<[" and mark[-1] in ">]" and "=" not in mark]
        marks = [mark for mark in marks if mark.count("<|") < 2]
        backend.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in [*marks, "<｜tool▁sep｜>"]])
    return Tokenizer(backend, eos_token_ids=[tiny_text.END])


@cache
def token_bytes(name: str, *, by_token: bool) -> TokenBytes:
    return TokenBytes(tokenizer_of(name, by_token=by_token))


class Ending(NamedTuple):
    finish: FinishReason
    matched_stop: str | int | None


def read(reading: Reader, ids: list[int], sizes: list[int], finish: FinishReason) -> tuple[list[Event], Ending, int]:
    """Returns the events of a reply in deltas of these sizes, the last of which takes the rest; and how it ended."""
    log, plain, num_tokens, at = EventLog(), "", 0, 0
    while True:
        size = sizes.pop(0) if sizes else len(ids)
        end = min(at + size, len(ids))
        delta = reading.push(ids[at:end], finish if end == len(ids) else RUNNING)
        if delta.events:
            assert delta.text == "".join(event.text for event in delta.events if event.kind is Kind.CONTENT)
            log.add(delta.events, plain)
        plain = "" if delta.events else plain + delta.text
        num_tokens += delta.num_tokens
        at = end
        if delta.finish:
            assert not reading.push([5], STOP).events
            return log.events, Ending(delta.finish, delta.matched_stop), num_tokens
