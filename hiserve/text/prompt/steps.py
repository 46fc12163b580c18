"""Encoding as a generator of steps: the driver chooses where each step runs.

Offline every step runs at once. The server runs short steps in its event loop and long ones in threads or child
processes, and switches between callers after any step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError
from hiserve.text.conversation import Conversation
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.split_points import ANCHOR, SplitPoints, ranges
from hiserve.text.tokens.tokenizer import Tokenizer

# About 30 ms of a thread, and 10 MB.
PIECE_CHARS = 2**16
# Characters of a token, rarely exceeded. Where they are, another piece is encoded.
TOKEN_CHARS = 6


class Encode(NamedTuple):
    """A step that tokenizes a text; its result is int32 ``[n]``."""

    text: str
    add_special_tokens: bool


class Render(NamedTuple):
    """A step that applies the chat template; its result is the text. ``max_chars`` as for ``ChatTemplate.render``."""

    chat: Conversation
    max_chars: int | None


class PromptLimit(NamedTuple):
    """The largest number of a prompt's tokens, and the treatment of a longer one.

    Attributes:
        most: Tokens.
        from_end: Keep the last tokens of a longer prompt instead of refusing it.
        param: The request field that the prompt came from.
    """

    most: int
    from_end: bool = False
    param: str = "prompt"


Steps = Generator[Encode | Render, Any, Int32Array]


def text_steps(text: str, split_points: SplitPoints, limit: PromptLimit, *, add_special_tokens: bool) -> Steps:
    """Encodes a plain text within a limit; returns its ids, int32 ``[n]``.

    Raises:
        ContextLengthError: The text is too long.
    """
    is_long = len(text) > PIECE_CHARS and split_points.exist
    around = None if not is_long else split_points.tokenizer.around if add_special_tokens else ([], [])
    if around is None:
        ids: Int32Array = yield Encode(text, add_special_tokens)
        return ids[-limit.most :] if limit.from_end else ids
    before, after = (np.array(ids, dtype=np.int32) for ids in around)
    return (yield from join_steps([before, text, after], split_points, limit))


def join_steps(parts: Sequence[str | Int32Array], split_points: SplitPoints, limit: PromptLimit) -> Steps:
    """Encodes the parts of a prompt within a limit; returns all ids, int32 ``[n]``.

    ``parts`` are texts, and known ids int32 ``[n]``. A long text is encoded in pieces, so that no step takes long and
    encoding stops once enough tokens are found.

    Raises:
        ContextLengthError: The prompt is too long.
    """
    found: list[Int32Array] = []
    num_found = 0

    def size() -> int:
        if not limit.from_end:
            return PIECE_CHARS
        return min(PIECE_CHARS, TOKEN_CHARS * max(0, limit.most - num_found) + PIECE_CHARS // 64)

    for part in reversed(parts) if limit.from_end else parts:
        spans = (
            ranges(part, split_points, size, from_end=limit.from_end, param=limit.param)
            if isinstance(part, str)
            else [(0, 0)]
        )
        for start, end in spans:
            if isinstance(part, str):
                ids = yield Encode(part[start:end] if start == 0 else ANCHOR + part[start:end], False)
                ids = ids if start == 0 else ids[split_points.num_anchor :]
            else:
                ids = part
            found.append(ids)
            num_found += ids.size
            if limit.from_end and num_found >= limit.most:
                return np.concatenate(found[::-1])[-limit.most :]
            if num_found > limit.most:
                raise ContextLengthError.of(f"at least {num_found} tokens", limit.most, limit.param)
    return np.concatenate(found[::-1] if limit.from_end else found) if found else np.empty(0, dtype=np.int32)


def run_steps(steps: Steps, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> Int32Array:
    """Runs steps in sequence in this thread; returns the ids, int32 ``[n]``.

    Raises:
        RequestError: The template refuses the messages, or the prompt is too long.
    """
    done: Any = None
    while True:
        try:
            step = steps.send(done)
        except StopIteration as end:
            ids: Int32Array = end.value
            return ids
        if isinstance(step, Encode):
            done = tokenizer.encode(step.text, add_special_tokens=step.add_special_tokens)
        else:
            assert template is not None, "a conversation without a template"
            done = template.render(step.chat, max_chars=step.max_chars)
