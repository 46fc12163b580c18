"""The blocks and events of a message, from the events of its reader."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from msgspec import UNSET

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
from hiserve.server.reply.blocks import CONTENT, BlockWriter
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import ServedModel, cache_miss, prompt_use
from hiserve.server.reply.generation import Generation
from hiserve.text.body.retention import HOUR_S
from hiserve.text.reader.buffer import Kind

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


class MessageWriter(BlockWriter[MessageEvent]):
    """Formats one message.

    Args:
        model: The served model.
        seal: Seals a thought.
        shows_thoughts: Show thoughts; otherwise their signatures alone.
        shows_tokens: Show the ids of the tokens.

    Attributes:
        name: Of the message; no other has it.
    """

    def __init__(
        self, model: ServedModel, seal: Callable[[str], str], *, shows_thoughts: bool, shows_tokens: bool = False
    ) -> None:
        super().__init__(is_never_empty=False, shows_tokens=shows_tokens)
        self.name = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._seal = seal
        self._shows_thoughts = shows_thoughts
        self._content: list[Content] = []

    def whole(self, choices: Choices) -> AssistantMessage:
        """Returns the message that is not streamed."""
        (generation,) = choices.generations
        self.push(generation.whole())
        end = end_of(generation)
        return AssistantMessage(
            id=self.name,
            model=self._model.name,
            content=self._content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=messages_usage(choices, self._model.page_size),
            token_ids=generation.tokens if self._shows_tokens else UNSET,
        )

    def open(self, choices: Choices) -> None:
        usage = messages_usage(choices, self._model.page_size)
        usage.output_tokens, usage.output_tokens_details = 0, UNSET
        message = AssistantMessage(id=self.name, model=self._model.name, content=[], usage=usage)
        self._made.append(MessageStart(message))

    def begin(self, kind: Kind, name: str, call_id: str) -> None:
        block: Content
        if kind is Kind.CALL:
            block = ToolUseContent(call_id, name, NO_INPUT)
        else:
            block = TextContent("") if kind is CONTENT else ThinkingContent("", "")
        self._made.append(BlockStart(self._index, block))
        self._content.append(msgspec.structs.replace(block))

    def add(self, kind: Kind, text: str) -> None:
        if kind is CONTENT:
            self._made.append(BlockDelta(self._index, TextDelta(text)))
        elif kind is Kind.CALL:
            self._made.append(BlockDelta(self._index, InputDelta(text)))
        elif self._shows_thoughts:
            self._made.append(BlockDelta(self._index, ThinkingDelta(text)))

    def end(self, kind: Kind, text: str, *, is_whole: bool) -> None:
        """Completes the block, and makes the events of its end; Anthropic's form does not say that a block was cut."""
        block = self._content[-1]
        if isinstance(block, TextContent):
            block.text = text
        elif isinstance(block, ToolUseContent):
            block.input = input_of(text)
        else:
            block.thinking, block.signature = text if self._shows_thoughts else "", self._seal(text)
            self._made.append(BlockDelta(self._index, SignatureDelta(block.signature)))
        self._made.append(BlockStop(self._index))

    def close(self, choices: Choices) -> None:
        end = end_of(choices.generations[0])
        self._made += [MessageDelta(end, messages_usage(choices, self._model.page_size)), MessageStop()]

    def encoded(self, events: list[MessageEvent]) -> bytes:
        """Returns events as they are sent: each has its type as its name, too."""
        return b"".join([HEADS[type(event)] + msgspec.json.encode(event) + b"\n\n" for event in events])


def input_of(arguments: str) -> msgspec.Raw:
    """Returns the arguments of a call as they were generated, or an object that holds them if they are no JSON object."""
    if not arguments:
        return NO_INPUT
    try:
        ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({INVALID_JSON: arguments}))
    return msgspec.Raw(arguments.encode())


def end_of(generation: Generation) -> MessageEnd:
    """Returns why a message ends."""
    reason = generation.reason
    if reason == "stop" and isinstance(generation.stop, str):
        return MessageEnd("stop_sequence", generation.stop)
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
    num_thought = choices.generations[0].num_thought
    return MessagesUsage(
        input_tokens=use.rest,
        cache_creation_input_tokens=use.written,
        cache_read_input_tokens=use.cached,
        cache_creation=CacheCreation(use.written - num_hour, num_hour),
        output_tokens=choices.num_generated,
        output_tokens_details=OutputDetails(num_thought) if num_thought else UNSET,
        cache_miss=cache_miss(choices.cached),
    )


def error_event(request_id: str, status: int, message: str, code: str, param: str | None) -> bytes:
    """Returns the event that ends a failed stream."""
    return b"event: error\ndata: " + ERRORS.body(status, message, code, param, request_id) + b"\n\n"


def _error_body(status: int, message: str, code: str, param: str | None, request_id: str) -> bytes:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = FaultDetails(code) if code == NO_THREADS else UNSET
    return msgspec.json.encode(MessagesError("error", MessagesFault(kind, printable(message), details), request_id))


ERRORS = ErrorForm(MessagesError, _error_body, {503: 529}, "request-id")
