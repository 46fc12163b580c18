"""Requests to ``/v1`` in OpenAI's form, and their replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from hiserve.config.serving import MAX_INT32
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.server.reply.format import ServedModel, Usage
from hiserve.server.reply.logprobs import ChatScores, PromptScores, TextScores
from hiserve.server.request.grammar_fields import OpenAIGrammarFields
from hiserve.server.request.resumption import ResumeIds
from hiserve.server.request.sampling_fields import (
    MAX_CHOICES,
    Limits,
    Name,
    NonEmpty,
    Priority,
    TokenIds,
    range_of,
)
from hiserve.text.abilities import Thinking
from hiserve.text.body.json import union
from hiserve.text.body.parser import MAX_PROMPTS, check_num_prompts, parse_prompt
from hiserve.text.body.retention import PromptCacheOptions, Retention

DEFAULT_COMPLETION_TOKENS = 16

# Read by ``parse_prompt``, which also takes arrays: msgspec has no type for lists of several types.
Prompts = Annotated[
    Any,
    union("a text, a list of token ids, or a list of those", NonEmpty, TokenIds, Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_PROMPTS)],
          Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)]),
]  # fmt: skip
Scores = Annotated[int, range_of("logprobs")]
MaxTokens = Annotated[int, range_of("max_tokens")]
MaxTokensOrNone = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Budget = Annotated[int, Meta(ge=0, le=MAX_INT32)]
NotTrue = Annotated[bool, Meta(extra_json_schema={"const": False})]


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``: a last event with the usage, or the usage so far in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(OpenAIGrammarFields, frozen=True, kw_only=True):
    """The fields that chat and text completions share."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, range_of("min_tokens")] | None = None
    best_of: Annotated[int, range_of("n")] | None = None
    prompt_logprobs: Annotated[int, range_of("prompt_logprobs")] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_INT32, extra_json_schema={"not": {"const": 0}})] | None
    ) = None
    cache_salt: Name | None = None
    rid: Name | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    resume_token_ids: ResumeIds | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    def __post_init__(self) -> None:
        """Refuses values that exclude each other.

        Raises:
            RequestError: Two fields do.
        """
        if self.best_of not in (None, self.num_choices):
            raise RequestError(f"best_of is {self.best_of}; only n ({self.num_choices}) is supported.", param="best_of")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1 for all that fits the context.",
                param="truncate_prompt_tokens",
            )

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def limit_field(self) -> str:
        """The name of the field that limits the generated tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; 0 in a text completion drops the one token that is generated."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def has_usage(self) -> bool:
        """Whether the events end with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether each event has the usage so far."""
        return self.stream_options is not None and self.has_usage and bool(self.stream_options.continuous_usage_stats)

    def params_with_scores(self, model: ServedModel, shown: int | None, echoed: int | None = None) -> SamplingParams:
        """Returns the sampling parameters; as ``SamplingFields.params``.

        Args:
            model: The model that is served.
            shown: Likeliest tokens shown for each generated one; None shows no scores.
            echoed: The same for each token of an echoed prompt.
        """
        scored = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return self.params(
            model,
            max_tokens=None if self.limit is None else max(1, self.limit),
            min_tokens=self.min_tokens,
            seed=self.seed,
            logprobs=shown,
            prompt_logprobs=max(scored, default=None),
        )


class ThinkingConfig(msgspec.Struct, frozen=True):
    """``thinking``: whether a chat's reply begins with a thought, and its most tokens."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Budget | None = None


class ChatOptions(OpenAIFields, frozen=True, kw_only=True):
    """A chat completion, without the fields of its conversation (``text.body.chat.ChatFields``)."""

    logprobs: bool | None = None
    top_logprobs: Scores | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    thinking: ThinkingConfig | None = None

    def __post_init__(self) -> None:
        """Refuses values that exclude each other."""
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens shown for each generated one; None shows no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thoughts(self) -> Thinking:
        """The request's switches of thoughts. The effort ``none`` turns them off; the least of several budgets applies."""
        effort, config = self.reasoning_effort, self.thinking or ThinkingConfig()
        is_on = {"enabled": True, "disabled": False}.get(config.type or "")
        given = (self.thinking_token_budget, self.thinking_budget, config.budget_tokens)
        budget = min((number for number in given if number is not None), default=None)
        return Thinking(False, budget=budget) if effort == "none" else Thinking(is_on, effort, budget=budget)

    def sampling(self, model: ServedModel) -> SamplingParams:
        """Returns the sampling parameters."""
        return self.params_with_scores(model, self.num_top)

    @property
    def limits(self) -> Limits:
        """The requested length; up to the context limit by default."""
        return Limits(self.limit, None, self.limit_field, "min_tokens", "messages")


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """A text completion. ``max_tokens`` 0, with ``echo``, generates nothing."""

    prompt: Prompts
    max_tokens: MaxTokensOrNone | None = None
    max_completion_tokens: MaxTokensOrNone | None = None
    echo: bool | None = None
    logprobs: Scores | NotTrue | None = None
    add_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        """Refuses values that exclude each other."""
        super().__post_init__()
        if self.logprobs is True:
            raise RequestError("logprobs must be a number of tokens, not true.", param="logprobs")
        if self.limit == 0 and not self.echo:
            raise RequestError(
                f"{self.limit_field} must be at least 1; without echo, 0 shows nothing.", param=self.limit_field
            )

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens shown for each generated one; None shows no scores."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    def sampling(self, model: ServedModel) -> SamplingParams:
        """Returns the sampling parameters; an echoed prompt has the scores that its reply has."""
        return self.params_with_scores(model, self.num_top, self.num_top if self.echo else None)

    @property
    def limits(self) -> Limits:
        """The requested length; by default OpenAI's 16 tokens."""
        return Limits(self.limit, DEFAULT_COMPLETION_TOKENS, self.limit_field, "min_tokens", "prompt")

    def prompts(self, vocab_size: int) -> list[str | Int32Array]:
        """Returns the prompts: non-empty texts, or int32 ``[n]`` with n > 0.

        Args:
            vocab_size: Token ids must be below it.

        Raises:
            RequestError: A prompt is empty or malformed, or there are too many.
        """
        given = self.prompt
        is_list = isinstance(given, list) and given and isinstance(given[0], str | list | np.ndarray)
        prompts = given if is_list else [given]
        check_num_prompts(len(prompts), "prompt")
        if len(prompts) * self.num_choices > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with {self.num_choices} choices each are too many; the most is {MAX_CHOICES} in all.",
                param="n",
            )
        return [parse_prompt(prompt, vocab_size=vocab_size) for prompt in prompts]


class MessageFunction(msgspec.Struct):
    """The function of a call, or an event's addition to it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class MessageInput(msgspec.Struct):
    """The custom tool of a call, or an event's addition to it."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class MessageCall(msgspec.Struct):
    """A call of a tool by the model; an event that adds to it may have its index and arguments, or input, alone."""

    function: MessageFunction | UnsetType = UNSET
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    custom: MessageInput | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """A message of the model."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatScores | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of ``/v1/chat/completions`` that is not streamed."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct):
    """An event's addition to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct):
    """An event's addition to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatScores | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """One continuation, or an event's addition to it."""

    index: int
    text: str
    logprobs: TextScores | None
    finish_reason: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Reply of ``/v1/completions`` that is not streamed."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: str = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class Chunk(msgspec.Struct):
    """An event of a stream, after the fields with which each begins. The last one may have the usage alone."""

    choices: list[ChatDeltaChoice] | list[TextChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class Card(msgspec.Struct):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """Reply of ``/v1/models``."""

    object: str
    data: list[Card]
