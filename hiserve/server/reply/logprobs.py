"""Log-probabilities of tokens, in OpenAI's two forms and vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hiserve.core.plan import WORD_BYTES, Scores
from hiserve.errors import RequestError
from hiserve.server.reply.generation import Generation, OutputDelta
from hiserve.text.tokens.detokenizer import Detokenizer

# The bytes of one token as it is spelled, special ones included (``text.tokens.detokenizer.TokenBytes.bytes_of``).
Spell = Callable[[int], bytes]
# In place of minus infinity, which JSON does not have.
LEAST_LOGPROB = -9999.0
# In one reply: some 100 MB of JSON.
MAX_PROMPT_SCORES = 2**20


class Scored(NamedTuple):
    """A token with its scores.

    Attributes:
        token: Its id.
        logprob: Its logprob.
        top: Ids and logprobs of the likeliest tokens, best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class TokenScore(msgspec.Struct):
    """A token of a chat with its logprob; ``bytes`` spell it."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenScore(TokenScore):
    """A generated token of a chat."""

    top_logprobs: list[TokenScore]


class ChatScores(msgspec.Struct):
    """``logprobs`` of a chat's choice: one entry a token."""

    content: list[ChatTokenScore]
    refusal: None = None


class TextScores(msgspec.Struct):
    """``logprobs`` of a text completion: four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, later: TextScores) -> TextScores:
        """Returns the scores of both parts of a text."""
        return TextScores(*(getattr(self, name) + getattr(later, name) for name in self.__struct_fields__))


class PromptScore(msgspec.Struct):
    """An entry of ``prompt_logprobs``; ``rank`` is None for a token that is not among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


# Of each token of a prompt, by token id; None of the first.
PromptScores = list[dict[str, PromptScore] | None]


def check_prompt_scores(number: int, param: str) -> None:
    """Refuses a reply with too many scores of prompt tokens.

    Args:
        number: Scores in the reply: of each token its own and those of the likeliest, for each choice that shows the prompt.
        param: The field that requests them.

    Raises:
        RequestError: There are more than ``MAX_PROMPT_SCORES``.
    """
    if number > MAX_PROMPT_SCORES:
        raise RequestError(
            f"the reply would show {number} scores of prompt tokens; the most is {MAX_PROMPT_SCORES}. Ask for fewer choices "
            "or prompts, or for fewer likeliest tokens.",
            param=param,
        )


def unpack(tokens: Sequence[int], packed: bytes, num_top: int) -> list[Scored]:
    """Returns tokens with their scores.

    Args:
        tokens: Token ids.
        packed: Their scores, as ``core.plan.Scores.pack`` writes them.
        num_top: Likeliest tokens in the scores of each.
    """
    scores = Scores.unpack(packed, num_top)
    assert len(scores.logprobs) == len(tokens), f"{len(tokens)} tokens with {len(scores.logprobs)} scores"
    top_logprobs = scores.top_logprobs.clip(min=LEAST_LOGPROB).tolist()
    tops = zip(scores.top_tokens.tolist(), top_logprobs, strict=True)
    logprobs = scores.logprobs.clip(min=LEAST_LOGPROB).tolist()
    return [
        Scored(token, logprob, list(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]


def scored_prompt(generation: Generation) -> tuple[list[int], list[Scored]]:
    """Returns the tokens of a choice's prompt, and all but the first with their scores.

    If the request was aborted before its prompt was computed, both stop at the last computed token.
    """
    generation = generation.scorer
    num_top = generation.sampling.prompt_logprobs
    assert num_top is not None, "scores of a prompt that were not asked for"
    packed = bytes(generation.prompt_scores)
    num_known = len(packed) // (WORD_BYTES * (1 + 2 * num_top))
    tokens = generation.prompt[: 1 + num_known].tolist()
    return tokens, unpack(tokens[1:], packed, num_top)


def chat_logprobs(output_delta: OutputDelta, num_top: int, spell: Spell) -> ChatScores:
    """Returns a chat choice's ``logprobs``.

    Args:
        output_delta: Tokens with their scores.
        num_top: Likeliest tokens in the scores of each.
        spell: Spells a token.
    """
    content = []
    for token, logprob, top in unpack(output_delta.tokens, output_delta.scores, num_top):
        likeliest = [TokenScore(*_spelled(spell(other), score)) for other, score in top]
        content.append(ChatTokenScore(*_spelled(spell(token), logprob), likeliest))
    return ChatScores(content)


class TextLogprobs:
    """Formats the ``logprobs`` of one text completion, delta by delta.

    Args:
        num_top: Likeliest tokens shown for each.
        spell: Spells a token.
        detokenizer: Decodes as for the text; counts characters.
        offset: Characters of the text before the first token; negative if tokens precede the text.
    """

    def __init__(self, num_top: int, spell: Spell, detokenizer: Detokenizer, offset: int = 0) -> None:
        self._num_top = num_top
        self._spell = spell
        self._detokenizer = detokenizer
        self._offset = offset

    def of_prompt(self, generation: Generation) -> TextScores:
        """Returns the scores of the prompt's tokens; the first token has none."""
        tokens, scored = scored_prompt(generation)
        return self._lists(tokens, [None, *scored])

    def of_delta(self, output_delta: OutputDelta) -> TextScores:
        """Returns the scores of the next tokens."""
        return self._lists(output_delta.tokens, unpack(output_delta.tokens, output_delta.scores, self._num_top))

    def skip(self, tokens: Sequence[int]) -> None:
        """Passes over tokens whose scores are not shown."""
        for token in tokens:
            self._next_offset(token)

    def _lists(self, tokens: Sequence[int], scored: Sequence[Scored | None]) -> TextScores:
        return TextScores(
            tokens=[token_text(self._spell(token)) for token in tokens],
            token_logprobs=[known and known.logprob for known in scored],
            top_logprobs=[known and self._by_text(known) for known in scored],
            text_offset=[self._next_offset(token) for token in tokens],
        )

    def _by_text(self, scored: Scored) -> dict[str, float]:
        """Likeliest first, then the token itself; of two tokens that read the same, the likelier is shown."""
        shown: dict[str, float] = {}
        for token, logprob in [*scored.top[: self._num_top], (scored.token, scored.logprob)]:
            shown.setdefault(token_text(self._spell(token)), logprob)
        return shown

    def _next_offset(self, token: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push([token]))
        return max(0, offset)


def prompt_logprobs(generation: Generation, num_shown: int, spell: Spell) -> PromptScores:
    """Returns vLLM's ``prompt_logprobs``: for each token of the prompt but the first, entries by token id.

    Args:
        generation: Has the prompt and its scores.
        num_shown: Likeliest tokens to show for each token.
        spell: Spells a token.
    """
    shown: PromptScores = [None]
    for token, logprob, top in scored_prompt(generation)[1]:
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        entries = {}
        for other, score in [*top[:num_shown], (token, logprob)]:
            entries[str(other)] = PromptScore(score, ranks.get(other), token_text(spell(other)))
        shown.append(entries)
    return shown


def token_text(spelled: bytes) -> str:
    """Returns the text of one token; OpenAI's ``bytes:\\xe2\\x80`` for part of a character."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _spelled(spelled: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """Returns the fields of a ``TokenScore``."""
    return token_text(spelled), logprob, list(spelled)
