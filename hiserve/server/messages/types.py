"""Requests to ``/v1/messages`` in Anthropic's form, and their replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hiserve.config.serving import MAX_INT32
from hiserve.core.request import LENGTHS, SamplingParams
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.server.reply.blocks import BlockEvent
from hiserve.server.reply.format import CacheMiss, ServedModel
from hiserve.server.request.grammar_fields import Constraint, GrammarFields
from hiserve.server.request.resumption import ResumeIds
from hiserve.server.request.sampling_fields import Limits, Name, Priority, StopText
from hiserve.text.body.chat import MAX_MESSAGES, MAX_PARTS
from hiserve.text.body.json import check_text
from hiserve.text.body.retention import CacheControl
from hiserve.text.body.tools import MAX_TOOLS

Key = Annotated[str, Meta(min_length=1)]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Words."""

    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A thought of an earlier reply. The signature holds the text that is used."""

    signature: str
    thinking: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """A thought that another server has hidden."""

    data: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool by the model."""

    id: Key
    name: Key
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """The name of a tool that a search has found."""

    tool_name: str
    cache_control: CacheControl | None = None


ResultBlocks = Annotated[list[TextBlock | ToolReferenceBlock], Meta(max_length=MAX_PARTS)]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call. Where the chat template has no place for ``is_error``, the model reads ``Error: `` before it."""

    tool_use_id: Key
    content: str | ResultBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessagesTurn(msgspec.Struct, frozen=True):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class MessagesTool(msgspec.Struct, frozen=True):
    """A tool that the client runs. Those of another ``type`` than ``custom`` are left out."""

    type: str | None = None
    name: Key | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True):
    """Whether and which tools the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: Key | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    """Whether the model thinks, how many tokens at most, and whether the reply shows it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON schema that the reply follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """The format of the reply, and the effort of its thought."""

    effort: Name | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    """A change of the conversation before it is shown to the model."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct, frozen=True):
    """Changes of the conversation. All but kept thoughts are ignored."""

    edits: list[ContextEdit] | None = None


class MessagesFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a prompt is made from."""

    messages: Annotated[list[MessagesTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    thread: Any = None
    cache_control: CacheControl | None = None
    cache_salt: Name | None = None
    model: str | None = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether the reply shows thoughts, or their signatures alone."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def constraints(self) -> list[Constraint]:
        """The grammars that ``output_config`` asks for.

        Raises:
            RequestError: The schema is out of bounds.
        """
        wanted = self.output_config and self.output_config.format
        param = "output_config.format.schema"
        return [Constraint(bounds.json_schema(wanted.schema, param), param, is_format=True)] if wanted else []


class MessagesOptions(GrammarFields, frozen=True, kw_only=True):
    """A message, without the fields of its prompt. ``max_tokens`` 0 fills the cache with the prompt, and shows no reply."""

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    stop_sequences: Annotated[list[StopText], Meta(max_length=LENGTHS["stop"])] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    resume_token_ids: ResumeIds | None = None
    priority: Priority | None = None
    rid: Name | None = None

    def __post_init__(self) -> None:
        """Refuses several choices.

        Raises:
            RequestError: The request has one.
        """
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}; a message has one choice.", param="n")

    @property
    def limits(self) -> Limits:
        """The requested length, cut to the context."""
        return Limits(self.max_tokens, None, "max_tokens", "min_tokens", "messages", is_cut=True)

    def sampling(self, model: ServedModel) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            RequestError: As ``SamplingFields.params``.
        """
        for text in self.stop_sequences or ():
            check_text(text, "stop_sequences")
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        fields = msgspec.structs.replace(self, stop=[*given, *(self.stop_sequences or ())])
        return fields.params(
            model,
            max_tokens=max(1, self.max_tokens),
            min_tokens=None,
            seed=self.seed,
            logprobs=None,
            prompt_logprobs=None,
        )


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """A text of the model."""

    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """A thought of the model; empty where it is not shown. The signature holds it."""

    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. Arguments that are no JSON object are the text ``INVALID_JSON`` of one."""

    id: str
    name: str
    input: msgspec.Raw


Content = TextContent | ThinkingContent | ToolUseContent


class OutputDetails(msgspec.Struct):
    """Generated tokens by kind."""

    thinking_tokens: int


class CacheCreation(msgspec.Struct):
    """Newly cached tokens by the time of their breakpoints; tokens without one count as five minutes."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(msgspec.Struct):
    """Tokens. The three input fields sum to the prompt: computed, computed and now cached, and read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET
    cache_miss: CacheMiss | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """Reply of ``/v1/messages`` that is not streamed."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    token_ids: list[int] | UnsetType = UNSET


class CountedTokens(msgspec.Struct):
    """Reply of ``/v1/messages/count_tokens``."""

    input_tokens: int


class MessageStart(BlockEvent, tag_field="type", tag="message_start"):
    """The first event."""

    message: AssistantMessage


class BlockStart(BlockEvent, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Content


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More words."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thought that is complete."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of the arguments of a call."""

    partial_json: str


class BlockDelta(BlockEvent, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(BlockEvent, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(msgspec.Struct):
    """Why a message ends."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(BlockEvent, tag_field="type", tag="message_delta"):
    """The message ends."""

    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(BlockEvent, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class FaultDetails(msgspec.Struct):
    """A code for Anthropic's clients."""

    error_code: str


class MessagesFault(msgspec.Struct):
    """The type and message of an error."""

    type: str
    message: str
    details: FaultDetails | UnsetType = UNSET


class MessagesError(msgspec.Struct):
    """Body of every error of these endpoints, and the data of an error in a stream."""

    type: Literal["error"]
    error: MessagesFault
    request_id: str
