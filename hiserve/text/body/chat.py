"""Chat requests: messages, tools, documents, and options of the chat template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from hiserve.errors import RequestError
from hiserve.text.body.json import MAX_VALUES, check_json, check_text, decode
from hiserve.text.body.retention import (
    FIVE_MINUTES_S,
    HALF_HOUR_S,
    HOUR_S,
    CacheBreakpoint,
    CacheControl,
    check_breakpoints,
    joined_texts,
    seconds_of,
)
from hiserve.text.body.tools import MAX_TOOLS, ChosenTools, Tool, ToolCall, call_of, choice_of, num_arguments, tools_of
from hiserve.text.conversation import Call, Conversation, Message, Result, Text, Thought, Turn
from hiserve.text.custom_tools import Pattern, no_pattern

MAX_MESSAGES = 4096
MAX_PARTS = 16_384  # of the content of one message
MAX_FIELDS = 64  # of one message
NOT_SHOWN = ("role", "content", "refusal")  # to the template as they are
NOT_SERVED = {
    "function_call": "use tool_calls",
    "audio": "use text",
}


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A part of a content."""

    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def retain_s(self) -> int:
        """How long the prompt up to here is to be kept; 0 without a breakpoint."""
        return max(seconds_of(self.cache_control), seconds_of(self.prompt_cache_breakpoint))


class RefusalPart(msgspec.Struct, frozen=True, tag="refusal"):
    """A part of a content in which an assistant refuses; the prompt shows it like a text."""

    refusal: str
    cache_control: ClassVar[None] = None
    retain_s: ClassVar[int] = 0

    @property
    def text(self) -> str:
        """As of a ``TextPart``."""
        return self.refusal


Part = TextPart | RefusalPart


class RequestMessage(msgspec.Struct, frozen=True):
    """A message. The template gets its other fields too, where they are strings."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request body that a conversation's prompt is made from."""

    messages: Annotated[list[RequestMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def parse_chat(body: dict[str, Any], pattern: Pattern = no_pattern) -> Conversation:
    """Returns the fields of a request body that the chat template receives; other fields are ignored.

    ``tool_choice`` ``none`` removes the tools from the prompt, so that the model does not call them.
    ``continue_final_message`` turns the generation prompt off, unless ``add_generation_prompt`` is given.

    Args:
        body: The request.
        pattern: Of its custom tools.

    Raises:
        RequestError: A field is malformed or not supported; ``param`` names it.
    """
    fields = decode(body, ChatFields)
    continues = bool(fields.continue_final_message)
    adds_prompt = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continues and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false.",
            param="continue_final_message",
        )
    if body.get("chat_template") is not None:
        raise RequestError(
            "chat_template is not supported in a request; the operator sets it (--chat-template).",
            param="chat_template",
        )
    contents = (message.content for message in fields.messages)
    check_breakpoints(piece.cache_control for pieces in contents if isinstance(pieces, list) for piece in pieces)
    for name in ("tools", "documents", "chat_template_kwargs"):
        check_json(body.get(name), name)
    tools, strict = tools_of(body.get("tools") or (), fields.tools or (), pattern)
    choice, is_named = choice_of(fields.tool_choice, strict)
    return Conversation(
        turns=_turns(body["messages"], fields.messages),
        tools=None if body.get("tool_choice") == "none" else tools or None,
        choice=choice,
        is_single=is_named or body.get("parallel_tool_calls") is False,
        documents=fields.documents or None,
        template_kwargs=fields.chat_template_kwargs or {},
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
    )


def join_parts(messages: list[Any]) -> None:
    """Joins the text parts of each content, in place, up to each breakpoint.

    Raises:
        RequestError: A message is malformed.
    """
    for value, message in zip(messages, decode({"messages": messages}, ChatFields).messages, strict=True):
        if isinstance(message.content, list):
            value["content"] = _merged(message.content)


def _turns(values: list[Message], messages: list[RequestMessage]) -> tuple[Turn, ...]:
    """Checks messages and converts them to turns.

    - The text parts of a content are joined. A missing content of an assistant that calls tools is the empty text.
    - ``developer`` becomes ``system``.
    - The ``arguments`` of a tool call are parsed to the object that templates expect. A text that is not a JSON
      object (a model may have written it) stays a text.
    - Other fields of a message are kept where they are strings.
    """
    turns, num_values = [], 0
    for i, (value, message) in enumerate(zip(values, messages, strict=True)):
        calls = message.tool_calls or []
        num_values += sum(map(num_arguments, calls))
        if num_values > MAX_VALUES:
            raise RequestError(
                f"the arguments of the tool calls up to messages[{i}] have more than {MAX_VALUES} values. Send fewer.",
                param=f"messages[{i}].tool_calls",
            )
        turns.append(_turn(value, message, f"messages[{i}]"))
    return tuple(turns)


def _turn(value: Message, message: RequestMessage, where: str) -> Turn:
    if len(value) > MAX_FIELDS:
        raise RequestError(f"{where} has {len(value)} fields; the most is {MAX_FIELDS}.", param=where)
    for name, remedy in NOT_SERVED.items():
        if value.get(name):
            raise RequestError(f"{where}.{name} is not supported; {remedy}.", param=f"{where}.{name}")
    calls, content = message.tool_calls, message.content
    if message.refusal and (content or message.role != "assistant"):
        fault = f"{where}.refusal must be in a message of the assistant without content."
        raise RequestError(fault, param=f"{where}.refusal")
    content = message.refusal or content
    if calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls must be in a message of the assistant.", param=f"{where}.tool_calls")
    if content is None and not calls:
        raise RequestError(f"{where}.content must be a string or a list of text parts.", param=f"{where}.content")
    texts = {name: text for name, text in value.items() if isinstance(text, str) and name not in NOT_SHOWN}
    text = _joined(content) if isinstance(content, list) else content or ""
    check_text(text, f"{where}.content")
    for name, other in texts.items():
        check_text(name, where)
        check_text(other, f"{where}.{name[:100]}")
    parts: list[Text | Thought | Call | Result] = []
    if message.role == "assistant" and (thought := texts.pop("reasoning_content", None)) is not None:
        parts.append(Thought(thought))
    pieces = content if isinstance(content, list) else []
    if message.role in ("tool", "assistant"):
        ttl_s = max((piece.retain_s for piece in pieces), default=0)
        is_result = message.role == "tool"
        parts.append(Result(texts.pop("tool_call_id", None), text, retain_s=ttl_s) if is_result else Text(text, ttl_s))
    else:
        parts += joined_texts([(piece.text, piece.retain_s) for piece in pieces]) if pieces else [Text(text)]
    parts += [call_of(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())]
    return Turn("system" if message.role == "developer" else message.role, tuple(parts), texts)


def _merged(parts: list[Part]) -> str | list[dict[str, Any]]:
    texts = joined_texts([(part.text, part.retain_s) for part in parts])
    if not any(text.retain_s for text in texts):
        return _joined(parts)
    controls = {HOUR_S: CacheControl("ephemeral", "1h"), FIVE_MINUTES_S: CacheControl("ephemeral")}
    points = {HALF_HOUR_S: CacheBreakpoint("explicit")}
    merged = [TextPart(text.text, controls.get(text.retain_s), points.get(text.retain_s)) for text in texts]
    return [msgspec.to_builtins(part) for part in merged]


def _joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)
