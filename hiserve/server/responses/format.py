"""The items and events of a response, from the events of its reader."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from hiserve.core.request import FinishReason
from hiserve.server.reply.blocks import CONTENT, BlockWriter
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import CachedTokensDetails, cache_miss, prompt_use, spec_details
from hiserve.server.reply.generation import OutputDelta
from hiserve.server.reply.logprobs import ChatScores, ChatTokenScore
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
from hiserve.server.responses.request import ClientTool
from hiserve.text.custom_tools import InputReader
from hiserve.text.reader.buffer import Kind

# Status of a response, and the reason of an incomplete one, by why its reply ended.
ENDS: dict[FinishReason, tuple[str, str | None]] = {
    FinishReason.LENGTH: ("incomplete", "max_output_tokens"),
    FinishReason.ABORT: ("cancelled", None),
}
# Starts of the types of events.
ITEM, PART = "response.output_item", "response.content_part"
TEXT, THOUGHT = "response.output_text", "response.reasoning_text"
TEXT_DELTA = f"{TEXT}.delta"
ARGUMENTS, INPUT = "response.function_call_arguments", "response.custom_tool_call_input"


class ResponseWriter(BlockWriter[ResponseEvent]):
    """Turns the blocks of one reply into items of a response, and into events of its stream.

    Args:
        response: Without output; it is filled in.
        page_size: Of the served model, in tokens.
        names: Of the tools that may be called, by the name that the model calls.
        seal: Seals a thought; None leaves thoughts without a seal.
        score: Returns the scores of a delta's tokens; None shows none.
        shows_tokens: Show the ids of the tokens.

    Attributes:
        response: The response so far.
    """

    _item: OutputItem  # the latest one
    _input: InputReader  # of the latest custom call

    def __init__(
        self,
        response: ResponseObject,
        page_size: int,
        names: Mapping[str, ClientTool],
        seal: Callable[[str], str] | None,
        score: Callable[[OutputDelta], ChatScores] | None = None,
        *,
        shows_tokens: bool = False,
    ) -> None:
        super().__init__(is_never_empty=True, shows_tokens=shows_tokens)
        self.response = response
        self._page_size = page_size
        self._names = names
        self._seal = seal
        self._score = score
        self._scores: list[ChatTokenScore] = []  # of all tokens so far
        self._num_shown = 0  # of them, those of texts that were added and all before
        self._num_events = 0

    def push(self, delta: OutputDelta) -> list[ResponseEvent]:
        """Returns the events of a delta."""
        if self._score is not None and delta.tokens:
            self._scores += self._score(delta).content
        return super().push(delta)

    def whole(self, choices: Choices) -> ResponseObject:
        """Returns the response that is not streamed."""
        whole = choices.generations[0].whole()
        self.push(whole)
        self.close(choices)
        self.response.token_ids = whole.tokens if self._shows_tokens else UNSET
        return self.response

    def open(self, choices: Choices) -> None:
        begun = msgspec.structs.replace(self.response, output=[])
        self._add("response.created", response=begun)
        self._add("response.in_progress", response=begun)

    def begin(self, kind: Kind, name: str, call_id: str) -> None:
        item = self._item = self._item_of(kind, name, call_id)
        self._add(f"{ITEM}.added", output_index=self._index, item=msgspec.structs.replace(item))
        self._num_shown = self._start
        if isinstance(item, OutputMessage | OutputReasoning):
            part = OutputText("") if isinstance(item, OutputMessage) else ReasoningText("")
            self._add_of_item(f"{PART}.added", content_index=0, part=part)

    def add(self, kind: Kind, text: str) -> None:
        """Makes the event of a text, a thought, arguments or an input."""
        if kind is CONTENT:  # most events: passing their fields on would cost as much as encoding them
            event = ResponseEvent(
                type=TEXT_DELTA,
                sequence_number=self._num_events,
                item_id=self._item.id,
                output_index=self._index,
                content_index=0,
                delta=text,
                logprobs=self._scores[self._num_shown : self._stop],
            )
            self._num_shown = self._stop
            self._made.append(event)
            self._num_events += 1
        elif kind is Kind.THOUGHT:
            self._add_of_item(f"{THOUGHT}.delta", content_index=0, delta=text)
        elif isinstance(self._item, FunctionCall):
            self._add_of_item(f"{ARGUMENTS}.delta", delta=text)
        elif isinstance(self._item, CustomCall):
            self._add_input(self._item, self._input.push(text))

    def end(self, kind: Kind, text: str, *, is_whole: bool) -> None:
        """Completes the item, and makes the events of its end."""
        item = self._item
        item.status = "completed" if is_whole else "incomplete"
        if isinstance(item, FunctionCall):
            item.arguments = text
            self._add_of_item(f"{ARGUMENTS}.done", name=item.name, arguments=text)
        elif isinstance(item, CustomCall):
            self._add_input(item, self._input.end())
            self._add_of_item(f"{INPUT}.done", input=item.input)
        elif isinstance(item, OutputMessage):
            scores = self._scores[self._start : self._num_shown]
            item.content = [OutputText(text, logprobs=scores)]
            self._add_of_item(f"{TEXT}.done", content_index=0, text=text, logprobs=scores)
            self._add_of_item(f"{PART}.done", content_index=0, part=item.content[0])
        else:
            item.content = [ReasoningText(text)]
            item.encrypted_content = UNSET if self._seal is None else self._seal(text)
            self._add_of_item(f"{THOUGHT}.done", content_index=0, text=text)
            self._add_of_item(f"{PART}.done", content_index=0, part=item.content[0])
        self._add(f"{ITEM}.done", output_index=self._index, item=item)
        self.response.output.append(item)

    def close(self, choices: Choices) -> None:
        """Completes the response, and makes its last event."""
        response = self.response
        response.status, reason = ENDS.get(choices.generations[0].finish, ("completed", None))
        response.incomplete_details = None if reason is None else IncompleteDetails(reason)
        response.usage = response_usage(choices, self._page_size)
        is_done = response.status == "completed"
        self._add("response.completed" if is_done else "response.incomplete", response=response)

    def failed(self, code: str, message: str) -> bytes:
        """Returns the last event of a reply that has failed, as it is sent."""
        self.response.status, self.response.error = "failed", ResponseFailure(code, message)
        self._add("response.failed", response=self.response)
        return self.encoded(self._taken())

    def encoded(self, events: list[ResponseEvent]) -> bytes:
        """Returns events as they are sent: each has its type as its name, too."""
        return b"".join(
            [b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        )

    def _item_of(self, kind: Kind, name: str, call_id: str) -> OutputItem:
        if kind is CONTENT:
            return OutputMessage(id=_new_id("msg"))
        if kind is Kind.THOUGHT:
            return OutputReasoning(id=_new_id("rs"))
        tool = self._names.get(name) or ClientTool(name)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.kind == "custom":
            self._input = InputReader()
            return CustomCall(id=_new_id("ctc"), call_id=call_id, name=tool.name, namespace=namespace)
        return FunctionCall(id=_new_id("fc"), call_id=call_id, name=tool.name, namespace=namespace)

    def _add_input(self, item: CustomCall, text: str) -> None:
        if text:
            item.input += text
            self._add_of_item(f"{INPUT}.delta", delta=text)

    def _add(self, kind: str, **fields: Any) -> None:
        self._made.append(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1

    def _add_of_item(self, kind: str, **fields: Any) -> None:
        self._add(kind, item_id=self._item.id, output_index=self._index, **fields)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def response_usage(choices: Choices, page_size: int) -> ResponseUsage:
    """Returns the token counts of a reply; ``page_size`` is that of the served model."""
    num_prompt, num_generated, cached = choices.num_prompt, choices.num_generated, choices.cached
    use = prompt_use(choices, page_size)
    by_tier = CachedTokensDetails(cached.device, cached.host, cached.store)
    return ResponseUsage(
        num_prompt,
        InputTokensDetails(use.cached, use.written, by_tier, cache_miss(cached)),
        num_generated,
        OutputTokensDetails(choices.generations[0].num_thought),
        num_prompt + num_generated,
        spec_details(choices.drafts),
    )
