"""What a request to ``/v1`` says beside its prompt: sampling, and what its reply shows."""

from __future__ import annotations

from typing import Any

import msgspec

from hiserve.config.serving import MAX_INT32
from hiserve.core.request import MAX_LOGPROBS, SamplingParams
from hiserve.errors import ContextLengthError, RequestError
from hiserve.server import known_fields
from hiserve.server.body_fields import MAX_NAME_CHARS, Fields
from hiserve.server.sampling_fields import parse_sampling

DEFAULT_COMPLETION_TOKENS = 16


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a body says beside its prompt.

    Attributes:
        sampling: As the engine gets it: with the scores that the shown ones need, and ``max_tokens`` at least 1.
        limit_field: The field that ``max_tokens`` came from, for error messages.
        keeps_tokens: False for ``max_tokens: 0``: the one token that is generated is dropped.
        has_echo: The text begins with the prompt.
        num_prompt_top: Likeliest tokens shown for each token of the prompt; None without ``prompt_logprobs``.
        truncate_prompt_tokens: Keep this many of the prompt's last tokens, -1 what fits the context; None keeps all.
        add_special_tokens: Let the tokenizer add what it puts around the text of a text completion.
        salt: Narrows the namespace; empty narrows nothing.
        priority: Larger is sooner.
        rid: Name by which the request can be aborted; None is its ``x-request-id``.
        is_stream: Answer with events.
        has_usage: End the events with the usage.
        has_running_usage: Put the usage so far into every event; only with ``has_usage``.
        has_token_ids: Return prompt and generated token ids.
    """

    sampling: SamplingParams
    limit_field: str
    keeps_tokens: bool
    has_echo: bool
    num_prompt_top: int | None
    truncate_prompt_tokens: int | None
    add_special_tokens: bool
    salt: str
    priority: int
    rid: str | None
    is_stream: bool
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool


def parse_options(
    body: dict[str, Any],
    defaults: SamplingParams,
    *,
    vocab_size: int,
    spec_steps: int,
    is_chat: bool,
    is_strict: bool,
) -> RequestOptions:
    """Reads everything but the prompt and the model.

    Args:
        body: The parsed body.
        defaults: Sampling where the body is silent.
        vocab_size: Token ids must be below it.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
        is_chat: Chat completion; otherwise text completion.
        is_strict: Refuse unknown fields.

    Raises:
        RequestError: A field is malformed, not supported or, if strict, unknown.
    """
    known_fields.check_fields(body, known_fields.CHAT if is_chat else known_fields.COMPLETIONS, is_strict=is_strict)
    fields = Fields(body)
    has_echo = not is_chat and fields.flag("echo")
    limit_field = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    max_tokens = fields.integer(limit_field, least=0 if has_echo else 1)
    logprobs = _chat_logprobs(fields) if is_chat else _completion_logprobs(fields)
    num_prompt_top = fields.integer("prompt_logprobs", least=0, most=MAX_LOGPROBS)
    scored = [number for number in (num_prompt_top, logprobs if has_echo else None) if number is not None]
    sampling = parse_sampling(
        fields,
        defaults,
        vocab_size=vocab_size,
        spec_steps=spec_steps,
        max_tokens=max(1, max_tokens) if max_tokens is not None else None,
        logprobs=logprobs,
        prompt_logprobs=max(scored, default=None),
    )
    best_of = fields.integer("best_of")
    if best_of not in (None, sampling.n):
        raise RequestError(f"best_of is {best_of}; only n ({sampling.n}) is supported.", param="best_of")
    stream_options = fields.nested("stream_options")
    return RequestOptions(
        sampling=sampling,
        limit_field=limit_field,
        keeps_tokens=max_tokens != 0,
        has_echo=has_echo,
        num_prompt_top=num_prompt_top,
        truncate_prompt_tokens=_truncate_prompt_tokens(fields),
        add_special_tokens=fields.flag("add_special_tokens", True),
        salt=fields.text("cache_salt", most=MAX_NAME_CHARS) or "",
        priority=fields.integer("priority", least=-MAX_INT32) or 0,
        rid=fields.text("rid", most=MAX_NAME_CHARS),
        is_stream=fields.flag("stream"),
        has_usage=stream_options.flag("include_usage"),
        has_running_usage=stream_options.flag("continuous_usage_stats"),
        has_token_ids=fields.flag("return_token_ids"),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs", least=0, most=MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return num_top or 0
    if num_top:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _completion_logprobs(fields: Fields) -> int | None:
    if fields.values.get("logprobs") is False:  # the chat endpoint's way to say none
        return None
    return fields.integer("logprobs", least=0, most=MAX_LOGPROBS)


def _truncate_prompt_tokens(fields: Fields) -> int | None:
    number = fields.integer("truncate_prompt_tokens", least=-1)
    if number == 0:
        raise fields.wrong("truncate_prompt_tokens", "at least 1, or -1 for what fits the context")
    return number


def fit_context(num_prompt: int, options: RequestOptions, max_model_len: int, *, is_chat: bool) -> SamplingParams:
    """Checks that prompt and reply fit the context.

    Args:
        num_prompt: Tokens of the prompt.
        options: What was asked for.
        max_model_len: Longest prompt plus output, in tokens.
        is_chat: Chat completion; otherwise text completion.

    Returns:
        The sampling parameters; a text completion without a limit gets OpenAI's default of 16 tokens.

    Raises:
        ContextLengthError: They do not fit; the message says what would.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"the prompt is too long: it has {num_prompt} tokens; this model's maximum context length is {max_model_len} "
            "tokens, reply included. Shorten the prompt.",
            param="messages" if is_chat else "prompt",
        )
    sampling = options.sampling
    for name, wanted in ((options.limit_field, sampling.max_tokens or 0), ("min_tokens", sampling.min_tokens)):
        if wanted > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and {name} is {wanted}; this model's maximum context length is "
                f"{max_model_len} tokens. "
                f"Shorten the prompt or lower {name} to {room}.",
                param=name,
            )
    if sampling.max_tokens is None and not is_chat:
        most = max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
        return msgspec.structs.replace(sampling, max_tokens=min(most, room))
    return sampling
