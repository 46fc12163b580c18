"""The items and events of a response, from the events of its reader."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from hiserve.core.request import FinishReason
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import CachedTokensDetails, cache_miss, prompt_use, spec_details
from hiserve.server.reply.generation import OutputDelta
from hiserve.server.responses.items import (
    CustomCall,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from hiserve.server.responses.request import CUSTOM, ClientTool
from hiserve.text.reader.buffer import Event, Kind

# Status of a response, and the reason of an incomplete one, by why its reply ended.
ENDS: dict[FinishReason, tuple[str, str | None]] = {
    FinishReason.LENGTH: ("incomplete", "max_output_tokens"),
    FinishReason.ABORT: ("cancelled", None),
}


# Starts of the types of events.
ITEM, PART = "response.output_item", "response.content_part"
TEXT, THOUGHT = "response.output_text", "response.reasoning_text"
ARGUMENTS, INPUT = "response.function_call_arguments", "response.custom_tool_call_input"


class ResponseWriter:
    """Turns the events of one reply into items of a response, and into events of its stream.

    Any partition of the reply into deltas gives the same events, but that texts come in other pieces. Words of white space
    alone are no item, unless they are the whole reply.

    Args:
        response: Without output; it is filled in.
        names: Of the tools that may be called, by the name that the model calls.
        seal: Seals a thought; None leaves thoughts without a seal.

    Attributes:
        response: The response so far.
    """

    def __init__(
        self, response: ResponseObject, names: Mapping[str, ClientTool], seal: Callable[[str], str] | None
    ) -> None:
        self.response = response
        self._names = names
        self._seal = seal
        self._item: OutputItem | None = None  # the open one
        self._texts: list[str] = []  # of the open one
        self._space = ""  # words of white space that may be no item
        self._num_events = 0
        self._made: list[ResponseEvent] = []

    def opening(self) -> list[ResponseEvent]:
        """Returns the events before the first item."""
        begun = msgspec.structs.replace(self.response, output=[])
        self._add("response.created", response=begun)
        self._add("response.in_progress", response=begun)
        return self._taken()

    def push(self, delta: OutputDelta) -> list[ResponseEvent]:
        """Returns the events of a part of the reply."""
        for event in delta.events:
            self._read(event)
        if delta.text and not delta.events:
            self._write(OutputMessage, delta.text)
        if delta.finish:
            self._end(delta.finish)
        return self._taken()

    def closing(self, usage: ResponseUsage) -> list[ResponseEvent]:
        """Returns the last event of a reply that has ended."""
        self.response.usage = usage
        is_done = self.response.status == "completed"
        self._add("response.completed" if is_done else "response.incomplete", response=self.response)
        return self._taken()

    def failed(self, code: str, message: str) -> list[ResponseEvent]:
        """Returns the last event of a reply that has failed."""
        self.response.status, self.response.error = "failed", ResponseFailure(code, message)
        self._add("response.failed", response=self.response)
        return self._taken()

    def _read(self, event: Event) -> None:
        if event.kind is Kind.CALL:
            self._open(self._call(event))
        elif event.kind is Kind.ARGUMENTS:
            self._texts.append(event.text)
            if isinstance(self._item, FunctionCall) and event.text:
                self._add_of_item(f"{ARGUMENTS}.delta", delta=event.text)
        elif event.kind is Kind.CALL_END:
            self._close(is_whole=True)
        elif event.text:
            self._write(OutputReasoning if event.kind is Kind.THOUGHT else OutputMessage, event.text)

    def _call(self, event: Event) -> FunctionCall | CustomCall:
        tool = self._names.get(event.text) or ClientTool(event.text)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.kind == "custom":
            return CustomCall(id=_new_id("ctc"), call_id=event.id, name=tool.name, namespace=namespace)
        return FunctionCall(id=_new_id("fc"), call_id=event.id, name=tool.name, namespace=namespace)

    def _write(self, kind: type[OutputMessage] | type[OutputReasoning], text: str) -> None:
        """Adds words or a thought to the open item, or to a new one."""
        if not isinstance(self._item, kind):
            if kind is OutputMessage:
                text = self._space + text
                if not text.strip():
                    self._space = text
                    return
            self._open(kind(id=_new_id("msg" if kind is OutputMessage else "rs")))
        self._texts.append(text)
        if kind is OutputMessage:
            self._add_of_item(f"{TEXT}.delta", content_index=0, delta=text, logprobs=[])
        else:
            self._add_of_item(f"{THOUGHT}.delta", content_index=0, delta=text)

    def _open(self, item: OutputItem) -> None:
        self._close(is_whole=not isinstance(self._item, FunctionCall | CustomCall))
        self._item, self._texts, self._space = item, [], ""
        self._add(f"{ITEM}.added", output_index=self._index, item=msgspec.structs.replace(item))
        if isinstance(item, OutputMessage | OutputReasoning):
            part = OutputText("") if isinstance(item, OutputMessage) else ReasoningText("")
            self._add_of_item(f"{PART}.added", content_index=0, part=part)

    def _close(self, *, is_whole: bool) -> None:
        """Ends the open item, if there is one."""
        item, text = self._item, "".join(self._texts)
        if item is None:
            return
        item.status = "completed" if is_whole else "incomplete"
        if isinstance(item, FunctionCall):
            item.arguments = text
            self._add_of_item(f"{ARGUMENTS}.done", name=item.name, arguments=text)
        elif isinstance(item, CustomCall):
            item.input = _custom_input(text)
            if item.input:
                self._add_of_item(f"{INPUT}.delta", delta=item.input)
            self._add_of_item(f"{INPUT}.done", input=item.input)
        elif isinstance(item, OutputMessage):
            item.content = [OutputText(text)]
            self._add_of_item(f"{TEXT}.done", content_index=0, text=text, logprobs=[])
            self._add_of_item(f"{PART}.done", content_index=0, part=item.content[0])
        else:
            item.content = [ReasoningText(text)]
            item.encrypted_content = UNSET if self._seal is None else self._seal(text)
            self._add_of_item(f"{THOUGHT}.done", content_index=0, text=text)
            self._add_of_item(f"{PART}.done", content_index=0, part=item.content[0])
        self._add(f"{ITEM}.done", output_index=self._index, item=item)
        self.response.output.append(item)
        self._item = None

    def _end(self, finish: FinishReason) -> None:
        self.response.status, reason = ENDS.get(finish, ("completed", None))
        self.response.incomplete_details = None if reason is None else IncompleteDetails(reason)
        if self._item is None and not self.response.output:  # a reply without words
            space = self._space
            self._open(OutputMessage(id=_new_id("msg")))
            if space:
                self._write(OutputMessage, space)
        is_call = isinstance(self._item, FunctionCall | CustomCall)
        self._close(is_whole=self.response.status == "completed" and not is_call)

    @property
    def _index(self) -> int:
        return len(self.response.output)

    def _add(self, kind: str, **fields: Any) -> None:
        self._made.append(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1

    def _add_of_item(self, kind: str, **fields: Any) -> None:
        assert self._item is not None, kind
        self._add(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _taken(self) -> list[ResponseEvent]:
        made, self._made = self._made, []
        return made


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _custom_input(arguments: str) -> str:
    """Returns the text that a custom tool is called with; arguments of another form as they are."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(CUSTOM) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def response_usage(choices: Choices, page_size: int) -> ResponseUsage:
    """Returns the token counts of a reply; ``page_size`` is that of the served model."""
    num_prompt, num_generated, cached = choices.num_prompt, choices.num_generated, choices.cached
    use = prompt_use(choices, page_size)
    by_tier = CachedTokensDetails(cached.device, cached.host, cached.store)
    events = choices.generations[0].events
    num_thought = sum(event.stop - event.start for event in events if event.kind is Kind.THOUGHT)
    return ResponseUsage(
        num_prompt,
        InputTokensDetails(use.cached, use.written, by_tier, cache_miss(cached)),
        num_generated,
        OutputTokensDetails(num_thought),
        num_prompt + num_generated,
        spec_details(choices.drafts),
    )
