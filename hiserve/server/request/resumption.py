"""``resume_token_ids``: a stream goes on after the tokens that its client has from another engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import ServedModel
from hiserve.server.reply.generation import Generation, OutputDelta
from hiserve.server.request.sampling_fields import TokenId, TokenIds
from hiserve.text.body.json import union
from hiserve.text.body.parser import parse_prompt

PARAM = "resume_token_ids"
# Read by ``resumed_tokens``, which also takes arrays.
ResumeIds = Annotated[
    Any,
    union("a list of token ids, of several choices such a list or null of each", TokenIds, list[list[TokenId] | None]),
]
# Of each choice, those that the client has; None of a choice that has ended. Empty for a request that resumes nothing.
Resumed = Sequence[list[int] | None]


def resumed_tokens(given: Any, model: ServedModel, *, is_stream: bool, num_choices: int = 1) -> Resumed:
    """Returns the tokens of each choice that the client has.

    Args:
        given: ``resume_token_ids``.
        model: Has the vocabulary.
        is_stream: The reply is a stream.
        num_choices: Of all prompts.

    Raises:
        RequestError: They are malformed, not one list a choice, all choices have ended, or the reply is no stream.
    """
    if given is None:
        return []
    if not is_stream:
        raise RequestError(f"{PARAM} goes on with a stream, and this reply is no stream.", param=PARAM)
    if num_choices == 1:
        return [_tokens(given, model)]
    entries = given if isinstance(given, list) else ()
    if len(entries) != num_choices or not all(isinstance(each, list | np.ndarray | None) for each in entries):
        raise RequestError(
            f"{PARAM} must have an entry for each of the {num_choices} choices: a list of token ids, or null if it has ended.",
            param=PARAM,
        )
    resumed = [[] if _is_empty(each) else None if each is None else _tokens(each, model) for each in entries]
    if not any(each is not None for each in resumed):
        raise RequestError(f"{PARAM} says that all choices have ended; nothing is left to resume.", param=PARAM)
    return resumed


async def resume(
    resumed: Resumed, choices: Choices, model: ServedModel, max_model_len: int
) -> list[tuple[Generation, OutputDelta]]:
    """Begins the choices of a reply after the tokens that the client has; those that have ended are not run.

    Returns:
        The choices of which the client has some, each with what it has.

    Raises:
        RequestError: A choice ends within its tokens, or the request is for what a resumed reply has not.
    """
    if len(resumed) > 1 and any(each.sampling.prompt_logprobs is not None for each in choices.generations):
        raise RequestError(
            f"{PARAM} of several choices cannot go on with scores of the prompt, which the first choice alone makes.",
            param=PARAM,
        )
    shown = []
    for generation, tokens in zip(choices.generations, resumed, strict=False):
        generation.is_over = tokens is None
        if tokens:
            check_resumed(tokens, generation.prompt, generation.sampling, model, max_model_len)
            shown.append((generation, await generation.resume(tokens)))
    return shown


def check_resumed(
    tokens: list[int], prompt: Int32Array, sampling: SamplingParams, model: ServedModel, max_model_len: int
) -> None:
    """Checks that a choice goes on after tokens, as far as the tokens say; stop texts are the business of its reader.

    Args:
        tokens: Of the choice.
        prompt: int32 ``[n]``.
        sampling: Of the choice.
        model: Has the end tokens.
        max_model_len: Longest prompt plus output, in tokens.

    Raises:
        RequestError: The choice has its full length, or one of the tokens ends it.
    """
    room = max_model_len - len(prompt)
    most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    if len(tokens) >= most:
        raise RequestError(
            f"{PARAM} has {len(tokens)} tokens, and the whole reply has at most {most}; nothing is left to resume.",
            param=PARAM,
        )
    ignores_ends = sampling.ignore_eos and sampling.grammar is None
    ends = {*sampling.stop_token_ids, *(() if ignores_ends else model.end_token_ids)}
    at = next((index for index, token in enumerate(tokens) if token in ends), None)
    if at is not None:
        raise RequestError(
            f"{PARAM} has the token {tokens[at]} at index {at}, which ends the reply; nothing is left to resume.",
            param=PARAM,
        )


def _tokens(given: Any, model: ServedModel) -> list[int]:
    tokens = parse_prompt(given, vocab_size=model.vocab_size, param=PARAM)
    if not isinstance(tokens, np.ndarray):
        raise RequestError(f"{PARAM} must be a list of token ids.", param=PARAM)
    return list(tokens.tolist())


def _is_empty(given: Any) -> bool:
    return isinstance(given, list) and not given
