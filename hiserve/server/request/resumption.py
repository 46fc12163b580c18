"""``resume_token_ids``: a stream goes on after the tokens that its client has from another engine."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.server.reply.format import ServedModel
from hiserve.server.request.sampling_fields import TokenIds
from hiserve.text.body.json import union
from hiserve.text.body.parser import parse_prompt

PARAM = "resume_token_ids"
# Read by ``resumed_tokens``, which also takes arrays.
ResumeIds = Annotated[Any, union("a list of token ids", TokenIds)]


def resumed_tokens(given: Any, model: ServedModel, *, is_stream: bool, num_choices: int) -> list[int]:
    """Returns the tokens of the reply that the client has; none for a request that resumes nothing.

    Args:
        given: ``resume_token_ids``.
        model: Has the vocabulary.
        is_stream: The reply is a stream.
        num_choices: Of all prompts.

    Raises:
        RequestError: They are malformed, or the reply is no stream of one choice.
    """
    if given is None:
        return []
    if not is_stream or num_choices != 1:
        shown = f"{num_choices} choices" if is_stream else "a reply that is no stream"
        raise RequestError(f"{PARAM} goes on with the stream of one choice, and this is {shown}.", param=PARAM)
    tokens = parse_prompt(given, vocab_size=model.vocab_size, param=PARAM)
    if not isinstance(tokens, np.ndarray):
        raise RequestError(f"{PARAM} must be a list of token ids.", param=PARAM)
    return list(tokens.tolist())


def check_resumed(
    tokens: list[int], prompt: Int32Array, sampling: SamplingParams, model: ServedModel, max_model_len: int
) -> None:
    """Checks that a reply goes on after tokens, as far as the tokens say; stop texts are the business of its reader.

    Args:
        tokens: Of the reply.
        prompt: int32 ``[n]``.
        sampling: Of the reply.
        model: Has the end tokens.
        max_model_len: Longest prompt plus output, in tokens.

    Raises:
        RequestError: The reply has its full length, or one of the tokens ends it.
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
