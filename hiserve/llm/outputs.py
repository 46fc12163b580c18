"""The results of a batch, and how they are made of a choice's tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hiserve.core.plan import Int32Array, Scores
from hiserve.core.request import SamplingParams
from hiserve.core.usage import NOTHING, CacheUse, DraftUse
from hiserve.errors import HiserveError
from hiserve.ipc.updates import TokenDelta
from hiserve.text.reader.buffer import Event, EventLog, called, thought
from hiserve.text.reader.output import ReplyOutput


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, by the model's own distribution.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm.
        top: The likeliest tokens with theirs, best first, as many as the request wants.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: Choice index, from 0.
        text: Decoded tokens, up to the stop text if one ended it; of a chat without its thoughts and calls.
        token_ids: Generated tokens, an end token included.
        finish_reason: ``stop``, ``tool_calls`` or ``length``.
        stop_reason: The stop text or stop token that ended it; None for an end-of-sequence token.
        logprobs: One entry per generated token, if the request wants them.
        reasoning: The thoughts of a chat.
        tool_calls: Its calls, as a message of the assistant has them: ``id``, ``type``, ``function``.
        events: What a chat's choice was read as.
        drafts: Drafts verified and accepted; None without speculation.
        first_token_s: When its first token came, seconds of ``time.perf_counter``.
        end_s: When its last one came.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    drafts: DraftUse | None = None
    first_token_s: float = 0.0
    end_s: float = 0.0


class RequestOutput:
    """A prompt and its choices.

    Args:
        prompt: The text, or None when token ids were given.
        tokens: int32 ``[n]``. Its tokens.

    Attributes:
        cached: Its tokens from the prefix cache, for the first choice.
        error: The reason, if the engine failed the request. The other requests of the batch go on.
        prompt_logprobs: One entry per prompt token but the first, which has None, if the request wants them.
    """

    def __init__(self, prompt: str | None, tokens: Int32Array) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.cached: CacheUse = NOTHING
        self.error: HiserveError | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._choices: list[CompletionOutput] = []

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens."""
        ids: list[int] = self.tokens.tolist()
        return ids

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The choices, by index.

        Raises:
            HiserveError: The request failed: ``error``.
        """
        if self.error is not None:
            raise self.error
        return self._choices

    def add(self, choice: CompletionOutput) -> None:
        """Adds a choice that is about to be generated."""
        self._choices.append(choice)

    @property
    def num_cached_tokens(self) -> int:
        """How many prompt tokens came from the prefix cache."""
        return self.cached.num_tokens


class ChoiceBuilder:
    """Fills in one choice as its tokens arrive."""

    def __init__(self, request: RequestOutput, index: int, sampling: SamplingParams, shown: ReplyOutput) -> None:
        self._request = request
        self._choice = CompletionOutput(index)
        self._sampling = sampling
        self._shown = shown
        self._scores: list[bytes | bytearray] = []
        self._log = EventLog()
        self._num_logged = 0  # characters of the text that the events have
        request.add(self._choice)

    def take(self, delta: TokenDelta) -> bool:
        """Adds output to the choice; returns True when it needs no more tokens."""
        choice, tokens = self._choice, delta.tokens
        if delta.cached is not None and choice.index == 0:
            self._request.cached = delta.cached
        choice.drafts = delta.drafts or choice.drafts
        choice.end_s = time.perf_counter()
        if tokens and not choice.token_ids:
            choice.first_token_s = choice.end_s
        self._scores.append(delta.scores)
        shown = self._shown.push(tokens, delta.finish)
        if shown.events:
            self._log.add(shown.events, choice.text[self._num_logged :])
            self._num_logged = len(choice.text) + len(shown.text)
        choice.text += shown.text
        choice.token_ids += tokens[: shown.num_tokens]
        choice.finish_reason = shown.finish.text
        choice.stop_reason = shown.matched_stop
        if shown.finish:
            self._read()
            self._unpack(b"".join(self._scores))
        return bool(shown.finish)

    def _read(self) -> None:
        choice = self._choice
        choice.events = self._log.events
        choice.reasoning = thought(choice.events)
        for call_id, name, arguments in called(choice.events).values():
            function = {"name": name, "arguments": arguments}
            choice.tool_calls.append({"id": call_id, "type": "function", "function": function})
        if choice.finish_reason == "stop" and self._log.has_calls:
            choice.finish_reason = "tool_calls"

    def _unpack(self, packed: bytes) -> None:
        num_top = self._sampling.prompt_logprobs
        if num_top is not None:
            prompt = self._request.prompt_token_ids
            size = 4 * (1 + 2 * num_top) * (len(prompt) - 1)
            self._request.prompt_logprobs = [None, *_logprobs(prompt[1:], packed[:size], num_top)]
            packed = packed[size:]
        if self._sampling.logprobs is not None:
            self._choice.logprobs = _logprobs(self._choice.token_ids, packed, self._sampling.logprobs)


def _logprobs(tokens: list[int], packed: bytes, num_top: int) -> list[TokenLogprob]:
    scores = Scores.unpack(packed, num_top)
    columns = scores.logprobs.tolist(), scores.top_tokens.tolist(), scores.top_logprobs.tolist()
    return [
        TokenLogprob(token, logprob, dict(zip(top, theirs, strict=True)))
        for token, logprob, top, theirs in zip(tokens, *columns, strict=False)  # scores after a stop text are dropped
    ]
