"""One choice of a reply: its token deltas become text, events, counts and one log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import numpy as np

from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.core.request import FinishReason, Retain, SamplingParams
from hiserve.core.usage import NOTHING, CacheUse
from hiserve.errors import HiserveError, InvariantError, RequestError
from hiserve.ipc.updates import RequestFacts, TokenDelta
from hiserve.scheduler.client import EngineClient
from hiserve.server.metrics.registry import RequestTimer
from hiserve.text.prompt.parts import Place
from hiserve.text.reader.buffer import Event, EventLog, Kind
from hiserve.text.reader.output import ReplyOutput

# Formatting scores of this size, four to eight bytes for each token, takes a few milliseconds.
QUICK_SCORE_BYTES = 2**14
RESUMED_AT_ONCE = 512  # tokens that take a millisecond or two to read

logger = logging.getLogger(__name__)
Remember = Callable[[str, list[int], Sequence[Event]], None]
Locate = Callable[[int], Place]  # the part of the conversation at a token of its prompt


class RequestContext(NamedTuple):
    """The caller and the priority of a request.

    Attributes:
        namespace: Separates tenants in the cache.
        priority: Larger is sooner.
        caller: Number of its API key.
        tag: Name by which it can be aborted.
        session: Digest that chooses a worker where no prefix does; empty without one.
        retain: Prefixes of the prompt that the cache evicts last.
    """

    namespace: bytes = b""
    priority: int = 0
    caller: int = 0
    tag: str = ""
    session: bytes = b""
    retain: Retain = ()


class OutputDelta(NamedTuple):
    """The next output of a choice.

    Attributes:
        choice: Index in the reply.
        text: Decoded characters that later tokens cannot change; may be empty.
        tokens: Token ids of the delta, without those after a stop text.
        scores: Of these tokens, packed; empty if not requested.
        finish: RUNNING until the last delta.
        stop: The text or token that ended the choice; None for another end.
        events: Thoughts, contents and calls, where the reply is read by its format; the text is that of the contents. Empty
            for content alone.
        has_calls: A call of the choice has ended.
    """

    choice: int
    text: str
    tokens: list[int]
    scores: bytes
    finish: FinishReason
    stop: str | int | None
    events: Sequence[Event] = ()
    has_calls: bool = False

    @property
    def reason(self) -> str | None:
        """OpenAI's ``finish_reason`` of a chat; None while the choice runs."""
        return "tool_calls" if self.has_calls and self.finish is FinishReason.STOP else self.finish.text


def nothing(choice: int) -> OutputDelta:
    """Returns an empty delta of a choice."""
    return OutputDelta(choice, "", [], b"", FinishReason.RUNNING, None)


class Generation:
    """One request in the engine: one choice for one prompt.

    Args:
        name: Id of the response, for the log.
        prompt: int32 ``[n]``.
        sampling: How to sample and when to stop.
        context: Its caller and priority.
        output: Reads the tokens of this choice.
        timer: Of this request.
        choice: Index in the reply.
        choice_index: Index among the choices of the prompt; part of the random key.
        scorer: The choice that scores the same prompt; None: this one.
        keeps_tokens: False drops generated tokens, for requests of a prompt's scores alone.
        locate: Returns the part of the conversation at which the cached prefix ends.
        remember: Called with text, token ids and events of a reply that was not aborted, before its last delta is yielded: the
            client may send its next request at once.

    Attributes:
        name: Id of the response.
        timer: Of this request.
        context: Its caller and priority.
        failure: The error that ended it.
        miss_place: Where in the conversation the cached prefix ends; None where it has all of it.
        facts: The engine's facts about the request, so far.
        scorer: The choice that holds the ``prompt_scores``.
        prompt_scores: Of the prompt's tokens but the first, packed; those of the scorer are complete at the first delta
            of each choice of the prompt.
        tokens: All token ids so far, resumed ones included.
        num_resumed: The first of them, which the client had before.
        is_over: The client had all of it before: it is not run.
        scores: Of all tokens after the resumed ones so far, packed.
        finish: RUNNING until the end.
        stop: The text or token that ended it; None for another end.
    """

    def __init__(
        self,
        name: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        context: RequestContext,
        *,
        output: ReplyOutput,
        timer: RequestTimer,
        choice: int = 0,
        choice_index: int = 0,
        scorer: Generation | None = None,
        keeps_tokens: bool = True,
        locate: Locate | None = None,
        remember: Remember | None = None,
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.sampling = sampling
        self.choice = choice
        self.context = context
        self._output = output
        self.timer = timer
        self._choice_index = choice_index
        self.scorer = scorer or self
        self._is_scored = asyncio.Event()
        self._keeps_tokens = keeps_tokens
        self._locate = locate
        self._remember = remember
        self._texts: list[str] = []
        self._events = EventLog()
        self._num_logged = 0  # texts whose content the events have
        self._num_score_bytes = 0 if sampling.logprobs is None else WORD_BYTES * (1 + 2 * sampling.logprobs)
        self.failure: Exception | None = None
        self.miss_place: Place | None = None
        self.facts = RequestFacts()
        self.prompt_scores = bytearray()
        self.tokens: list[int] = []
        self.num_resumed = 0
        self.is_over = False
        self.scores = bytearray()
        self.finish = FinishReason.RUNNING
        self.stop: str | int | None = None

    @property
    def cached(self) -> CacheUse:
        """Prompt tokens that came from the cache."""
        return self.facts.cached or NOTHING

    @property
    def events(self) -> list[Event]:
        """The events of the reply so far; empty where it is text alone."""
        return self._events.events

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far."""
        return sum(event.stop - event.start for event in self.events if event.kind is Kind.THOUGHT)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def has_many_prompt_scores(self) -> bool:
        """Whether formatting them takes long."""
        return len(self.prompt_scores) > QUICK_SCORE_BYTES

    def whole(self) -> OutputDelta:
        """Returns the choice so far."""
        scores, events = bytes(self.scores), self.events
        return OutputDelta(self.choice, self.text, self.tokens, scores, self.finish, self.stop, events, self._has_calls)

    @property
    def reason(self) -> str | None:
        """As of ``OutputDelta``."""
        return nothing(self.choice)._replace(finish=self.finish, has_calls=self._has_calls).reason

    @property
    def _has_calls(self) -> bool:
        return self._events.has_calls

    async def resume(self, tokens: list[int]) -> OutputDelta:
        """Reads tokens of the reply that another engine generated and the client has; ``run`` goes on after them.

        Returns:
            The output that the client has.

        Raises:
            RequestError: The reply ends within them, by a stop text or its one call.
        """
        for begin in range(0, len(tokens), RESUMED_AT_ONCE):
            self._read(tokens[begin : begin + RESUMED_AT_ONCE], FinishReason.RUNNING)
            if self.finish:
                raise RequestError(
                    f"the reply ends with token {len(self.tokens)} of resume_token_ids; nothing is left to resume.",
                    param="resume_token_ids",
                )
            await asyncio.sleep(0)  # other requests come in between
        self.num_resumed = len(tokens)
        return self.whole()

    async def run(self, engine: EngineClient) -> AsyncGenerator[OutputDelta, None]:
        """Yields deltas until the choice ends. Closing the generator aborts the request.

        Raises:
            HiserveError: The engine refused or failed the request.
        """
        reason, detail = "abort", ""
        self.timer.begin()
        tokens = np.append(self.prompt, np.array(self.tokens, dtype=np.int32)) if self.tokens else self.prompt
        stream = engine.generate(
            tokens,
            self.sampling,
            choice=self._choice_index,
            num_resumed=self.num_resumed,
            **self.context._asdict(),
        )
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    output_delta = self._take(delta)
                    if output_delta.finish:
                        if not delta.finish:  # a stop text: the engine would continue
                            await deltas.aclose()
                        self._end(output_delta.finish.name.lower())
                        if self._remember and output_delta.finish is not FinishReason.ABORT:
                            self._remember(self.text, self.tokens, self.events)
                    if output_delta.tokens or output_delta.events or output_delta.text or output_delta.finish:
                        self._is_scored.set()
                        if not self.scorer.is_over:
                            await self.scorer._is_scored.wait()
                        yield output_delta
            if not self.finish:
                raise InvariantError(f"{self.name}: the engine's stream ended after {len(self.tokens)} tokens")
        except (HiserveError, InvariantError) as error:
            reason, detail, self.failure = "error", f" ({error})", error
            raise
        finally:
            self._is_scored.set()
            self._end(reason, detail)

    def _take(self, delta: TokenDelta) -> OutputDelta:
        tokens, scores = delta.tokens, b""
        if delta.cached is not None:
            if self._locate and delta.cached.is_short:
                self.miss_place = self._locate(delta.cached.miss_at)
            self.timer.admitted(delta.cached, delta.queue_s, self.miss_place)
        self.facts.update(delta)
        self.timer.tokens(len(tokens))
        if delta.scores:
            of_prompt = len(delta.scores) - len(tokens) * self._num_score_bytes
            self.prompt_scores += delta.scores[:of_prompt]
            scores = bytes(delta.scores[of_prompt:])
        if not self._keeps_tokens:
            self.finish = FinishReason.LENGTH if tokens else delta.finish
            return OutputDelta(self.choice, "", [], b"", self.finish, None)
        text, num_tokens, events = self._read(tokens, delta.finish)
        if num_tokens < len(tokens):
            tokens, scores = tokens[:num_tokens], scores[: num_tokens * self._num_score_bytes]
        self.scores += scores
        has_calls = bool(self.finish) and self._has_calls
        return OutputDelta(self.choice, text, tokens, scores, self.finish, self.stop, events, has_calls)

    def _read(self, tokens: list[int], finish: FinishReason) -> tuple[str, int, Sequence[Event]]:
        """Adds the next tokens to the reply; returns their text, how many of them count, and their events."""
        text, num_tokens, self.finish, self.stop, events = self._output.push(tokens, finish)
        self.tokens += tokens[:num_tokens]
        if events:
            self._events.add(events, "".join(self._texts[self._num_logged :]))
            self._num_logged = len(self._texts) + 1
        self._texts.append(text)
        return text, num_tokens, events

    def _end(self, reason: str, detail: str = "") -> None:
        """Counts and logs the end once; later calls are for requests that have ended already."""
        if self.timer.e2e_s is not None:
            return
        self.timer.ended(reason, self._output.num_unread)
        logger.info(
            "%s %s%s: %d prompt tokens, %d cached, %d generated, first token after %s, %.3f s in all",
            self.name,
            reason,
            detail,
            len(self.prompt),
            self.cached.num_tokens,
            len(self.tokens),
            "-" if self.timer.ttft_s is None else f"{self.timer.ttft_s:.3f} s",
            self.timer.e2e_s,
        )
