"""Responses, their items and their events in OpenAI's form; items of stored responses, read as input, listed, or referred to."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hiserve.errors import RequestError
from hiserve.server.reply.blocks import BlockEvent
from hiserve.server.reply.format import CachedTokensDetails, CacheMiss, SpecTokensDetails
from hiserve.server.reply.logprobs import ChatTokenScore
from hiserve.server.responses.store import StoredResponse, missing_item
from hiserve.server.responses.types import ChosenTool, InputPart, Item, Reasoning, TextOptions
from hiserve.text.body.json import check_text


class OutputText(msgspec.Struct, tag="output_text"):
    """A text of the model."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenScore] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """A thought of the model."""

    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag="message", kw_only=True):
    """Words of the model."""

    id: str
    status: Status = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(msgspec.Struct, tag="reasoning", kw_only=True):
    """A thought of the model."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(msgspec.Struct, tag="function_call", kw_only=True):
    """A call of a function by the model."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCall(msgspec.Struct, tag="custom_tool_call", kw_only=True):
    """A call of a custom tool by the model."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem = OutputMessage | OutputReasoning | FunctionCall | CustomCall


class InputTokensDetails(msgspec.Struct):
    """Tokens of the prompt that came from the cache, and those that went to it."""

    cached_tokens: int
    cache_write_tokens: int
    cached_tokens_details: CachedTokensDetails
    cache_miss: CacheMiss | None


class OutputTokensDetails(msgspec.Struct):
    """Tokens of thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    spec_tokens_details: SpecTokensDetails | UnsetType = UNSET


class ResponseFailure(msgspec.Struct):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is incomplete."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. The fields after the output repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | ChosenTool
    tools: msgspec.Raw
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    token_ids: list[int] | UnsetType = UNSET


class ResponseEvent(BlockEvent, kw_only=True):
    """An event of a stream; its type decides which fields it has."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatTokenScore] | UnsetType = UNSET


class Deleted(msgspec.Struct):
    """Reply to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """The input items of a response."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    """Tokens of a prompt."""

    input_tokens: int
    object: str = "response.input_tokens"


class _Output(msgspec.Struct):
    """The output of a stored response, read as input."""

    output: list[Item]


def all_items(chain: Sequence[StoredResponse]) -> list[Item]:
    """Returns the items of stored responses, their outputs included, in order."""
    return [item for stored in chain for item in (*own_items(stored), *_output(stored))]


def own_items(stored: StoredResponse) -> list[Item]:
    """Returns the input items of a stored response, after those of earlier responses."""
    return msgspec.json.decode(stored.items, type=list[Item])


def with_id(item: Item) -> Item:
    """Returns an item of the input as it is listed."""
    content = item.content
    if isinstance(content, str):
        content = [InputPart("output_text" if item.role == "assistant" else "input_text", content)]
    made_id = item.id or f"item_{secrets.token_hex(16)}"
    return msgspec.structs.replace(item, type=item.type or "message", id=made_id, content=content)


def references(items: Sequence[Item]) -> list[str]:
    """Returns the ids that references among items name, in order.

    Raises:
        RequestError: A reference has no id, or that of another one.
    """
    named = dict[str, None]()
    for i, item in enumerate(items):
        if not item.is_reference:
            continue
        where = f"input[{i}].id"
        if not item.id:
            raise RequestError(f"{where} is missing; an item_reference has one.", param=where)
        check_text(item.id, where)
        if item.id in named:
            raise RequestError(f"{where} is {item.id[:100]!r} again; refer to an item once.", param=where)
        named[item.id] = None
    return list(named)


def resolved(items: Sequence[Item], holding: Callable[[Sequence[str]], Sequence[StoredResponse]]) -> list[Item]:
    """Returns items with stored ones in the places of references.

    Args:
        items: Of the input.
        holding: Returns the responses that have the items with these ids.

    Raises:
        NotFoundError: No stored item has the id of a reference.
        RequestError: A reference is malformed.
    """
    wanted = references(items)
    known = {item.id: item for item in all_items(holding(wanted))}
    if lost := [each for each in wanted if each not in known]:
        raise missing_item(lost[0])
    return [known[item.id] if item.is_reference else item for item in items]


def _output(stored: StoredResponse) -> list[Item]:
    return msgspec.json.decode(stored.reply, type=_Output).output
