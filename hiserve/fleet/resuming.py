"""Streams that go on at another engine when theirs dies: the events are those of one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from hiserve.fleet.stream_events import BlockEvents, ItemEvents, NativeEvents, OpenAIEvents, StreamEvents
from hiserve.server.request.sampling_fields import MAX_CHOICES

PROTOCOLS: dict[str, Callable[[dict[str, Any]], StreamEvents]] = {
    "/v1/chat/completions": OpenAIEvents,
    "/v1/completions": OpenAIEvents,
    "/generate": NativeEvents,
    "/v1/messages": BlockEvents,
    "/v1/responses": ItemEvents,
}
# Names of fields with the scores of prompts, which a resumed stream of several choices does not have.
PROMPT_SCORES = ("prompt_logprobs", "echo", "logprob_start_len")
# Opens a stream of a request's body at an engine, by its index; yields bytes, any partition of the reply.
Opens = Callable[[int, bytes], AsyncGenerator[bytes, None]]


class Resumption:
    """The tokens of one stream so far, and the request that goes on after them.

    An event goes to the client once the tokens are known of which it is a part: the next engine sends what comes after them. The
    event with the end of a choice waits for the end of the stream, as no engine goes on with a choice that has ended.

    Args:
        body: Of the request.
        events: Reads the stream.
        num_choices: Of all prompts.

    Attributes:
        is_over: Its last event has come.
        is_plain: The answer is no stream: a refusal, which passes as it is.
    """

    def __init__(self, body: dict[str, Any], events: StreamEvents, num_choices: int = 1) -> None:
        self._body = body
        self._events = events
        given = body.get("resume_token_ids") or [[]] * num_choices
        if num_choices == 1 and given != [[]]:
            given = [given]
        self._tokens: list[list[int] | None] = [None if each is None else list(each) for each in given]
        self._rest = b""  # of an event that has not ended
        self._held: list[
            tuple[int | None, bytes]
        ] = []  # events that the next engine would send again, with their choices
        self._ended: set[int | None] = set()  # choices of which the end is held
        self._num_events = 0
        self.is_over = self.is_plain = False

    @classmethod
    def of(cls, path: str, raw: bytes) -> Resumption | None:
        """Returns that of a request; None of one that cannot be resumed."""
        if path not in PROTOCOLS:
            return None
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        if not isinstance(body, dict) or body.get("stream") is not True:
            return None
        number = _num_choices(body)
        given = body.get("resume_token_ids")
        if number > 1:
            is_readable = not any(body.get(name) for name in PROMPT_SCORES) and (
                given is None
                or (
                    isinstance(given, list)
                    and len(given) == number
                    and all(isinstance(it, list | None) for it in given)
                )
            )
        else:
            is_readable = number == 1 and isinstance(given, list | None)
        is_scored = path == "/v1/responses" and bool(body.get("include")) and _is_scored(body["include"])
        return cls(body, PROTOCOLS[path](body), number) if is_readable and not is_scored else None

    @property
    def body(self) -> bytes:
        """The request for the next engine."""
        wanted = {**self._body, **self._events.wanted}
        if any(tokens is None or tokens for tokens in self._tokens):
            wanted["resume_token_ids"] = self._tokens if len(self._tokens) > 1 else self._tokens[0]
        return msgspec.json.encode(wanted)

    def push(self, data: bytes) -> bytes:
        """Takes bytes of an engine; returns those for the client: of whole events, which alone have been received for sure."""
        if self.is_plain:
            return data
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(map(self._event, events))

    def broke(self) -> None:
        """Forgets what a dead engine sent in part; the next one sends it again."""
        self._num_events -= len(self._held)
        self._rest, self._held, self._ended = b"", [], set()
        self._events.broke()

    def _event(self, event: bytes) -> bytes:
        """Returns the events that the client gets now."""
        name, _, payload = event.partition(b"data: ")  # the first: a text may have these characters
        if name == b"event: ping\n":
            return event + b"\n\n"
        if payload == b"[DONE]" or not payload.startswith(b"{"):
            self.is_over = self.is_over or payload == b"[DONE]"
            return self._shown(None) + event + b"\n\n"
        chunk: dict[str, Any] = msgspec.json.decode(payload)
        choice, tokens, is_end, is_last = self._events.read(chunk, self._tokens)
        self.is_over = self.is_over or is_last
        if self._events.mend(chunk):
            if "sequence_number" in chunk:
                chunk["sequence_number"] = self._num_events
            self._num_events += 1
            self._held.append((choice, name + b"data: " + msgspec.json.encode(chunk) + b"\n\n"))
        if is_end:
            self._ended.add(choice)
        if choice is not None and choice not in self._ended:
            known = self._tokens[choice]
            assert known is not None, f"choice {choice} has ended before"
            known += tokens
        return self._shown(choice if tokens else None)

    def _shown(self, choice: int | None) -> bytes:
        """Takes the held events of a choice whose tokens are known, or all at the end of the stream."""
        choices = {held for held, _ in self._held} if self.is_over else {choice} - self._ended - {None}
        shown = [event for held, event in self._held if held in choices]
        self._held = [(held, event) for held, event in self._held if held not in choices]
        return b"".join(shown)


async def resumed(
    resumption: Resumption, engines: Sequence[int], opens: Opens, failures: tuple[type[Exception], ...]
) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of a stream, from one engine after the other while they fail.

    Args:
        resumption: Of the stream.
        engines: To try, in order.
        opens: Opens a stream at one of them.
        failures: Raised by a stream whose engine is gone.

    Raises:
        Exception: The last of ``failures``, if every engine has failed, or the client has a part of what cannot be resumed.
    """
    has_begun = False
    for index, engine in enumerate(engines):
        try:
            async with aclosing(opens(engine, resumption.body)) as stream:
                async for data in stream:
                    if shown := resumption.push(data):
                        has_begun = True
                        yield shown
            if resumption.is_over or resumption.is_plain:
                return
            raise ConnectionError("the engine's stream ended early")
        except failures:
            if resumption.is_over:
                return  # it died after its last event
            if index == len(engines) - 1 or (has_begun and resumption.is_plain):
                raise
            resumption.broke()


def _num_choices(body: dict[str, Any]) -> int:
    """Returns the choices of all prompts; 0 where they are unknown, or are more than an engine takes."""
    sampling = body.get("sampling_params")
    given = [
        each.get("n") if isinstance(each, dict) else None
        for each in (sampling if isinstance(sampling, list) else [sampling])
    ]
    numbers = [1 if number is None else number for number in (body.get("n"), *given)]
    if not all(type(number) is int and number > 0 for number in numbers):
        return 0
    prompts = next((body[name] for name in ("prompt", "text", "input_ids") if body.get(name)), None)
    num_prompts = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], list | str) else 1
    number = numbers[0] * (sum(numbers[1:]) if isinstance(sampling, list) else num_prompts * numbers[1])
    return number if number <= MAX_CHOICES else 0


def _is_scored(include: Any) -> bool:
    return not isinstance(include, list) or "message.output_text.logprobs" in include
