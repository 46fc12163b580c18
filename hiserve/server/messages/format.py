"""The blocks and events of a message, from the events of its reader."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from hiserve.core.request import FinishReason
from hiserve.server.http.errors import ErrorForm, printable
from hiserve.server.messages.request import INVALID_JSON, NO_THREADS
from hiserve.server.messages.types import (
    AssistantMessage,
    BlockDelta,
    BlockStart,
    BlockStop,
    CacheCreation,
    Content,
    FaultDetails,
    InputDelta,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessagesError,
    MessagesFault,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputDetails,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import ServedModel, cache_miss, prompt_use
from hiserve.server.reply.generation import OutputDelta
from hiserve.text.body.chat import HOUR_S
from hiserve.text.reader.buffer import Event, Kind

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS: tuple[type[MessageEvent], ...] = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)
HEADS = {kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode() for kind in KINDS}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
NO_INPUT = msgspec.Raw(b"{}")
ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MessageWriter:
    """Formats one message. Any partition of the reply into deltas gives the same blocks.

    Content of white space alone is no block, unless it is the whole reply: clients may not send such a block back.

    Args:
        model: The served model.
        seal: Seals a thought.
        shows_thoughts: Show thoughts; otherwise their signatures alone.

    Attributes:
        name: Of the message; no other has it.
    """

    def __init__(self, model: ServedModel, seal: Callable[[str], str], *, shows_thoughts: bool) -> None:
        self.name = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._seal = seal
        self._shows_thoughts = shows_thoughts
        self._content: list[Content] = []
        self._kind: Kind | None = None  # of the open block
        self._texts: list[str] = []  # of the open block
        self._space = ""  # content that may be no block
        self._made: list[MessageEvent] = []

    def whole(self, choices: Choices) -> AssistantMessage:
        """Returns the message that is not streamed."""
        delta = choices.generations[0].whole()
        self.push(delta)
        end = end_of(delta)
        return AssistantMessage(
            id=self.name,
            model=self._model.name,
            content=self._content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=messages_usage(choices, self._model.page_size),
        )

    async def events(self, pieces: AsyncGenerator[OutputDelta, None], choices: Choices) -> AsyncGenerator[bytes, None]:
        """Yields the events of a message, those of one delta together. The first delta has the cached tokens of the prompt."""
        end = MessageEnd(None, None)
        is_begun = False
        async with aclosing(pieces):
            async for delta in pieces:
                made = self.push(delta)
                if not is_begun:
                    is_begun = True
                    made = [self._opening(choices), *made]
                if delta.finish:
                    end = end_of(delta)
                if made:
                    yield encoded(made)
        yield encoded([MessageDelta(end, messages_usage(choices, self._model.page_size)), MessageStop()])

    def push(self, delta: OutputDelta) -> list[MessageEvent]:
        """Returns the events of a part of the reply."""
        if delta.text and not delta.events:
            self._write(Kind.CONTENT, delta.text)
        for event in delta.events:
            self._read(event)
        if delta.finish:
            if not self._content and (space := self._space):
                self._open(Kind.CONTENT, TextContent(""))
                self._add(space)
            self._close()
        made, self._made = self._made, []
        return made

    def _opening(self, choices: Choices) -> MessageStart:
        usage = messages_usage(choices, self._model.page_size)
        usage.output_tokens, usage.output_tokens_details = 0, UNSET
        return MessageStart(AssistantMessage(id=self.name, model=self._model.name, content=[], usage=usage))

    def _read(self, event: Event) -> None:
        if event.kind is Kind.CALL:
            self._open(Kind.CALL, ToolUseContent(event.id, event.text, NO_INPUT))
        elif event.kind is Kind.CALL_END:
            self._close()
        elif event.kind is Kind.ARGUMENTS:
            self._add(event.text)
        else:
            self._write(event.kind, event.text)

    def _write(self, kind: Kind, text: str) -> None:
        """Adds to a text or a thought."""
        if kind is not self._kind:
            text = self._space + text if kind is Kind.CONTENT else text
            if kind is Kind.CONTENT and not text.strip():
                self._space = text
                return
            if not text:
                return
            self._open(kind, TextContent("") if kind is Kind.CONTENT else ThinkingContent("", ""))
        self._add(text)

    def _open(self, kind: Kind, block: Content) -> None:
        self._close()
        self._kind, self._texts, self._space = kind, [], ""
        self._made.append(BlockStart(len(self._content), block))
        self._content.append(msgspec.structs.replace(block))

    def _add(self, text: str) -> None:
        if not text:
            return
        self._texts.append(text)
        if self._kind is Kind.CONTENT:
            self._delta(TextDelta(text))
        elif self._kind is Kind.CALL:
            self._delta(InputDelta(text))
        elif self._shows_thoughts:
            self._delta(ThinkingDelta(text))

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta) -> None:
        self._made.append(BlockDelta(len(self._content) - 1, delta))

    def _close(self) -> None:
        """Ends the open block, if there is one."""
        if self._kind is None:
            return
        text, block = "".join(self._texts), self._content[-1]
        if isinstance(block, TextContent):
            block.text = text
        elif isinstance(block, ToolUseContent):
            block.input = input_of(text)
        else:
            block.thinking, block.signature = text if self._shows_thoughts else "", self._seal(text)
            self._delta(SignatureDelta(block.signature))
        self._made.append(BlockStop(len(self._content) - 1))
        self._kind = None


def input_of(arguments: str) -> msgspec.Raw:
    """Returns the arguments of a call as they were generated, or an object that holds them if they are no JSON object."""
    if not arguments:
        return NO_INPUT
    try:
        ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({INVALID_JSON: arguments}))
    return msgspec.Raw(arguments.encode())


def end_of(delta: OutputDelta) -> MessageEnd:
    """Returns why a message ends."""
    if delta.finish is FinishReason.STOP and not delta.has_calls and isinstance(delta.stop, str):
        return MessageEnd("stop_sequence", delta.stop)
    reason = delta.reason
    return MessageEnd(REASONS.get(reason, reason) if reason else None, None)


def messages_usage(choices: Choices, page_size: int) -> MessagesUsage:
    """Returns the token counts of a message so far.

    Args:
        choices: The one choice.
        page_size: Of the served model.
    """
    use = prompt_use(choices, page_size)
    for_hour = max((num_tokens for num_tokens, ttl_s in choices.retain if ttl_s >= HOUR_S), default=0)
    num_hour = max(0, min(for_hour, use.cached + use.written) - use.cached)
    events = choices.generations[0].events
    num_thought = sum(event.stop - event.start for event in events if event.kind is Kind.THOUGHT)
    return MessagesUsage(
        input_tokens=use.rest,
        cache_creation_input_tokens=use.written,
        cache_read_input_tokens=use.cached,
        cache_creation=CacheCreation(use.written - num_hour, num_hour),
        output_tokens=choices.num_generated,
        output_tokens_details=OutputDetails(num_thought) if num_thought else UNSET,
        cache_miss=cache_miss(choices.cached),
    )


def encoded(events: Iterable[MessageEvent]) -> bytes:
    """Returns events as they are sent: each has its type as its name, too."""
    return b"".join([HEADS[type(event)] + msgspec.json.encode(event) + b"\n\n" for event in events])


def error_event(request_id: str, status: int, message: str, code: str, param: str | None) -> bytes:
    """Returns the event that ends a failed stream."""
    return b"event: error\ndata: " + ERRORS.body(status, message, code, param, request_id) + b"\n\n"


def _error_body(status: int, message: str, code: str, param: str | None, request_id: str) -> bytes:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = FaultDetails(code) if code == NO_THREADS else UNSET
    return msgspec.json.encode(MessagesError("error", MessagesFault(kind, printable(message), details), request_id))


ERRORS = ErrorForm(MessagesError, _error_body, {503: 529}, "request-id")
