"""Reads requests to ``/generate`` in SGLang's form; each becomes one or more single prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hiserve.config.serving import MAX_INT32
from hiserve.core.plan import Int32Array
from hiserve.core.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from hiserve.errors import ContextLengthError, RequestError
from hiserve.server.body_fields import MAX_NAME_CHARS, Fields
from hiserve.server.known_fields import SAMPLING, check_fields
from hiserve.server.prompt_fields import MAX_CHOICES
from hiserve.server.sampling_fields import parse_sampling
from hiserve.text.body_parser import MAX_PROMPTS, parse_prompt

DEFAULT_NEW_TOKENS = 128
# Fields that may be lists with an entry for each prompt.
PER_PROMPT = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
GENERATE = frozenset(
    {*PER_PROMPT, "text", "input_ids", "stream", "return_text_in_logprobs", "cache_salt", "priority", "model"}
)
NATIVE_SAMPLING = SAMPLING - {"max_tokens", "min_tokens", "seed"} | {
    "max_new_tokens",
    "min_new_tokens",
    "sampling_seed",
    "seed",
}


class NativePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what is asked for it.

    Attributes:
        prompt: A non-empty text, or int32 ``[n]`` with n > 0.
        sampling: As the engine gets it, with ``max_tokens`` at least 1; ``fitted`` fits it to the context.
        keeps_tokens: False for ``max_new_tokens: 0``: the one token that is generated is dropped.
        is_default_length: The request does not say how many tokens.
        first_scored: Tokens of the prompt from this index on are shown with their logprobs; None shows none.
        rid: Name of the request, or None.
    """

    prompt: str | Int32Array
    sampling: SamplingParams
    keeps_tokens: bool
    is_default_length: bool
    first_scored: int | None
    rid: str | None


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to ``/generate``.

    Attributes:
        prompts: At least one.
        is_list: The reply is a list.
        is_stream: Answer with events.
        has_texts: Show the text of tokens beside their logprobs.
        salt: Narrows the namespace; empty narrows nothing.
        priority: Larger is sooner.
    """

    prompts: list[NativePrompt]
    is_list: bool
    is_stream: bool
    has_texts: bool
    salt: str
    priority: int


def parse_native(
    body: dict[str, Any], defaults: SamplingParams, *, vocab_size: int, spec_steps: int, is_strict: bool
) -> NativeRequest:
    """Reads a request.

    Args:
        body: The parsed body.
        defaults: Sampling where the body is silent.
        vocab_size: Token ids must be below it.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
        is_strict: Refuse unknown fields.

    Raises:
        RequestError: A field is malformed, not supported or, if strict, unknown.
    """
    check_fields(body, GENERATE, is_strict=is_strict)
    fields = Fields(body)
    if fields.has("text") == fields.has("input_ids"):
        raise RequestError("give either text or input_ids.", param="text")
    name = "text" if fields.has("text") else "input_ids"
    given = body[name]
    is_batch = (
        isinstance(given, list)
        and bool(given)
        and isinstance(given[0], list | np.ndarray if name == "input_ids" else str)
    )
    values = given if is_batch else [given]
    if len(values) > MAX_PROMPTS:
        raise RequestError(f"{name} has {len(values)} prompts; the most is {MAX_PROMPTS}.", param=name)
    if not isinstance(values[0], str if name == "text" else list | np.ndarray):
        wanted = "a string or a list of strings" if name == "text" else "a list of token ids, or a list of such lists"
        raise fields.wrong(name, wanted)
    prompts = [
        _parse_one(
            parse_prompt(value, vocab_size=vocab_size, param=name), one, defaults, vocab_size, spec_steps, is_strict
        )
        for value, one in zip(values, _each(body, len(values), is_batch=is_batch), strict=True)
    ]
    num_choices = sum(prompt.sampling.n for prompt in prompts)
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"the request asks for {num_choices} choices; the most is {MAX_CHOICES}.", param="sampling_params.n"
        )
    return NativeRequest(
        prompts=prompts,
        is_list=is_batch or num_choices > 1,
        is_stream=fields.flag("stream"),
        has_texts=fields.flag("return_text_in_logprobs"),
        salt=fields.text("cache_salt", most=MAX_NAME_CHARS) or "",
        priority=fields.integer("priority", least=-MAX_INT32) or 0,
    )


def fitted(asked: NativePrompt, num_prompt: int, max_model_len: int) -> SamplingParams:
    """Checks that prompt and reply fit the context; returns the sampling parameters.

    Raises:
        ContextLengthError: They do not fit; the message says what would.
    """
    room, sampling = max_model_len - num_prompt, asked.sampling
    if room < 1:
        raise ContextLengthError(
            f"the prompt is too long: it has {num_prompt} tokens; this model's maximum context length is {max_model_len} "
            "tokens, reply included. Shorten the prompt.",
            param="text" if isinstance(asked.prompt, str) else "input_ids",
        )
    num_new = 0 if asked.is_default_length else sampling.max_tokens or 0
    for name, wanted in (("max_new_tokens", num_new), ("min_new_tokens", sampling.min_tokens)):
        if wanted > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and {name} is {wanted}; this model's maximum context length is "
                f"{max_model_len} tokens. "
                f"Shorten the prompt or lower {name} to {room}.",
                param=f"sampling_params.{name}",
            )
    if asked.is_default_length:
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens or room, room))
    return sampling


def num_prompt_scores(asked: NativePrompt, num_prompt: int) -> int:
    """Returns how many scores of its prompt's tokens are shown, all choices together."""
    if asked.first_scored is None:
        return 0
    sampling = asked.sampling
    return sampling.n * max(0, num_prompt - asked.first_scored) * (1 + (sampling.prompt_logprobs or 0))


def _each(body: dict[str, Any], num_prompts: int, *, is_batch: bool) -> list[dict[str, Any]]:
    """Returns the fields of each prompt: its own entry of a list, or the one value that is for all."""
    singles: list[dict[str, Any]] = [{} for _ in range(num_prompts)]
    for name in PER_PROMPT:
        value = body.get(name)
        if is_batch and isinstance(value, list):
            if len(value) != num_prompts:
                raise RequestError(f"{name} has {len(value)} entries for {num_prompts} prompts.", param=name)
            for single, entry in zip(singles, value, strict=True):
                single[name] = entry
        else:
            for single in singles:
                single[name] = value
    return singles


def _parse_one(
    prompt: str | Int32Array,
    one: dict[str, Any],
    defaults: SamplingParams,
    vocab_size: int,
    spec_steps: int,
    is_strict: bool,
) -> NativePrompt:
    fields = Fields(one)
    given = fields.nested("sampling_params")
    max_tokens = given.integer("max_new_tokens", least=0)
    is_default = max_tokens is None
    min_tokens = given.integer("min_new_tokens", least=0)
    if max_tokens is not None and (min_tokens or 0) > max(1, max_tokens):
        raise given.wrong("min_new_tokens", f"at most max_new_tokens ({max_tokens})")
    seed = given.integer("sampling_seed" if given.has("sampling_seed") else "seed", least=0, most=MAX_SEED)
    start = fields.integer("logprob_start_len", least=-1)
    num_top = fields.integer("top_logprobs_num", least=0, most=MAX_LOGPROBS) or 0
    has_logprobs = fields.flag("return_logprob")
    first_scored = start if has_logprobs and start is not None and start >= 0 else None
    ours = {**given.values, "min_tokens": min_tokens, "seed": seed}
    try:
        check_fields(given.values, NATIVE_SAMPLING, is_strict=is_strict)
        sampling = parse_sampling(
            Fields(ours),
            defaults,
            vocab_size=vocab_size,
            spec_steps=spec_steps,
            max_tokens=max(1, min_tokens or 0, DEFAULT_NEW_TOKENS) if max_tokens is None else max(1, max_tokens),
            logprobs=num_top if has_logprobs else None,
            prompt_logprobs=None if first_scored is None else num_top,
        )
    except RequestError as error:
        raise RequestError(f"sampling_params.{error.message}", param=f"sampling_params.{error.param}") from None
    return NativePrompt(
        prompt=prompt,
        sampling=sampling,
        keeps_tokens=max_tokens != 0,
        is_default_length=is_default,
        first_scored=first_scored,
        rid=fields.text("rid", most=MAX_NAME_CHARS) or None,
    )
