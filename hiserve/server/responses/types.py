"""Requests to ``/v1/responses`` in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.server.reply.format import ServedModel
from hiserve.server.request.grammar_fields import Constraint, JsonSchema
from hiserve.server.request.resumption import PARAM, ResumeIds
from hiserve.server.request.sampling_fields import Limits, Name, NonEmpty, Priority, SamplingFields, range_of
from hiserve.text.abilities import Thinking
from hiserve.text.body.chat import MAX_MESSAGES, MAX_PARTS
from hiserve.text.body.json import check_text
from hiserve.text.body.retention import CacheBreakpoint, PromptCacheOptions, Retention
from hiserve.text.body.tools import MAX_TOOLS
from hiserve.text.custom_tools import Syntax

MAX_INCLUDE = 32
SEALED = "reasoning.encrypted_content"
SCORED = "message.output_text.logprobs"  # others are of tools that OpenAI runs


class InputPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a content. A breakpoint asks to keep the prompt up to there; in a reply it is ignored."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    def __post_init__(self) -> None:
        """Refuses a part without its text, as msgspec does for a field that is always needed."""
        if self._given is None:
            raise ValueError(f"Object missing required field `{'refusal' if self.type == 'refusal' else 'text'}`")

    @property
    def _given(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text

    @property
    def shown(self) -> str:
        """The text, or that of a refusal, which the prompt shows like one."""
        assert self._given is not None, "a part without a text is refused"
        return self._given


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of the input; its type decides which fields it has, and a missing one is a message. Others are ignored."""

    type: (
        Literal[
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "item_reference",
        ]
        | None
    ) = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it stands for the stored item with its id; clients may leave its type out."""
        is_bare = self.type is None and self.id is not None and self.role is None and self.content is None
        return is_bare or self.type == "item_reference"


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a custom tool's input; the prompt shows the definition."""

    type: Literal["text", "grammar"] = "text"
    syntax: Syntax | None = None
    definition: str | None = None


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """A function or custom tool; a tool of another type is one that OpenAI runs itself."""

    type: str
    name: NonEmpty | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponseTool(ToolFields, frozen=True, kw_only=True):
    """A tool, or a namespace of tools."""

    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None


class ToolName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool of the request."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(ToolName, frozen=True, kw_only=True):
    """A tool that must be called; or, as ``allowed_tools``, those that may be, or must by ``mode``."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolName], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``text.format``; ``strict`` refuses a schema that cannot be held to the letter."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: JsonSchema = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """``reasoning``; thoughts are shown whole, and no summary is made."""

    effort: Name | None = None
    summary: Name | None = None


class InputFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a prompt is made from."""

    input: str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    model: str | None = None
    conversation: Annotated[Any, Meta(extra_json_schema={"const": None})] = None

    def __post_init__(self) -> None:
        """Refuses fields without support."""
        if self.conversation is not None:
            raise RequestError(
                "conversation is not supported; send the items, or previous_response_id.", param="conversation"
            )

    @property
    def items(self) -> list[Item]:
        """The input; a text is a message of the user."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input or []

    @property
    def thinking(self) -> Thinking:
        """The request's switches of thoughts."""
        effort = self.reasoning.effort if self.reasoning else None
        is_off = effort == "none"
        return Thinking(False if is_off else None, None if is_off else effort)

    @property
    def format(self) -> TextFormat:
        """The form of the reply."""
        given = (self.text.format if self.text else None) or TextFormat(type="text")
        return given if given.type == "json_schema" else TextFormat(type=given.type)

    @property
    def constraint(self) -> Constraint | None:
        """The grammar of the reply, if there is one.

        Raises:
            RequestError: It is out of bounds.
        """
        form = self.format
        for name in ("name", "description"):
            check_text(getattr(form, name) or "", f"text.format.{name}")
        if form.type == "text":
            return None
        if form.type == "json_object":
            return Constraint(bounds.any_object(), "text.format", is_format=True)
        grammar = bounds.json_schema(form.schema, "text.format.schema")
        return Constraint(grammar, "text.format.schema", may_relax=not form.strict, is_format=True)


class ResponseOptions(SamplingFields, frozen=True, kw_only=True):
    """A request for a response, without the fields of its prompt (``InputFields``)."""

    max_output_tokens: Annotated[int, range_of("max_tokens")] | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, range_of("logprobs")] | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDE)] | None = None
    store: bool | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    resume_token_ids: ResumeIds | None = None
    background: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None
    prompt: Annotated[Any, Meta(extra_json_schema={"const": None})] = None
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
    ] | None = None  # fmt: skip
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    user: Name | None = None
    cache_salt: Name | None = None
    rid: Name | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        """Refuses values that nothing here can honour."""
        if self.background:
            raise RequestError("background responses are not supported; stream it instead.", param="background")
        if self.prompt is not None:
            raise RequestError("prompt is not supported: no prompts are stored here; use instructions.", param="prompt")
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}; a response has one choice.", param="n")
        if self.top_logprobs and self.num_top is None:
            raise RequestError(f"top_logprobs needs {SCORED} in include.", param="top_logprobs")
        if self.resume_token_ids is not None and self.num_top is not None:
            raise RequestError(
                f"{PARAM} cannot go on with {SCORED}: the last events have the scores of all tokens.", param=PARAM
            )

    def sampling(self, model: ServedModel) -> SamplingParams:
        """Returns the sampling parameters."""
        return self.params(
            model,
            max_tokens=self.max_output_tokens,
            min_tokens=None,
            seed=self.seed,
            logprobs=self.num_top,
            prompt_logprobs=None,
        )

    @property
    def limits(self) -> Limits:
        """The requested length, cut to the context; up to the context limit by default."""
        return Limits(self.max_output_tokens, None, "max_output_tokens", "min_tokens", "input", is_cut=True)

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens shown for each token of the texts; None shows no scores."""
        return (self.top_logprobs or 0) if SCORED in (self.include or ()) else None

    @property
    def seals(self) -> bool:
        """Whether thoughts are sealed."""
        return SEALED in (self.include or ())
