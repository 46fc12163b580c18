"""Streams of chats and completions that go on at another engine when theirs dies: the events are those of one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

ROUTES = ("/v1/chat/completions", "/v1/completions")
# Opens a stream of a request's body at an engine, by its index; yields bytes, any partition of the reply.
Opens = Callable[[int, bytes], AsyncGenerator[bytes, None]]


class Resumption:
    """The tokens of one stream so far, and the request that goes on after them.

    Args:
        body: Of the request; a stream of one choice can be resumed.

    Attributes:
        is_over: Its last event has come.
        is_plain: The answer is no stream: a refusal, which passes as it is.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._shows_tokens = bool(body.get("return_token_ids"))
        self._tokens: list[int] = list(body.get("resume_token_ids") or [])
        self._head: dict[str, Any] = {}  # fields that each event of the first engine has
        self._rest = b""  # of an event that has not ended
        # Events that the next engine would send again: before the first token, and from the one with the finish on.
        self._held = b""
        self._is_ending = False
        self.is_over = self.is_plain = False

    @classmethod
    def of(cls, path: str, raw: bytes) -> Resumption | None:
        """Returns that of a request; None of one that cannot be resumed."""
        if path not in ROUTES:
            return None
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        if not isinstance(body, dict) or body.get("stream") is not True or body.get("n") not in (None, 1):
            return None
        prompt = body.get("prompt")
        is_single = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
        return cls(body) if is_single and isinstance(body.get("resume_token_ids") or [], list) else None

    @property
    def body(self) -> bytes:
        """The request for the next engine."""
        wanted = self._body | {"return_token_ids": True}
        if self._tokens:
            wanted["resume_token_ids"] = self._tokens
        return msgspec.json.encode(wanted)

    def push(self, data: bytes) -> bytes:
        """Takes bytes of an engine; returns those for the client: of whole events, which alone have been received for sure."""
        if self.is_plain:
            return data
        *events, self._rest = (self._rest + data).split(b"\n\n")
        shown = b""
        for event in events:
            self._held += self._event(event)
            if self.is_over or (self._tokens and not self._is_ending):
                shown, self._held = shown + self._held, b""
        return shown

    def broke(self) -> None:
        """Forgets what a dead engine sent in part; the next one sends it again."""
        self._rest = self._held = b""
        self._is_ending = False

    def _event(self, event: bytes) -> bytes:
        payload = event.removeprefix(b"data: ")
        if payload == b"[DONE]" or not payload.startswith(b"{"):
            self.is_over = self.is_over or payload == b"[DONE]"
            return event + b"\n\n"
        chunk: dict[str, Any] = msgspec.json.decode(payload)
        self.is_over = self.is_over or "error" in chunk
        for name in ("id", "created", "system_fingerprint"):
            if name in chunk:
                chunk[name] = self._head.setdefault(name, chunk[name])
        for choice in chunk.get("choices", ()):
            self._is_ending = self._is_ending or bool(choice.get("finish_reason"))
            if not self._is_ending:
                self._tokens += choice.get("token_ids") or ()
            if not self._shows_tokens:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        if not self._shows_tokens:
            chunk.pop("prompt_token_ids", None)
            if _is_empty(chunk, self._body):
                return b""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


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
            if index == len(engines) - 1 or (has_begun and resumption.is_plain):
                raise
            resumption.broke()


def _is_empty(chunk: dict[str, Any], body: dict[str, Any]) -> bool:
    """Whether a chunk has nothing but the token ids that its client did not ask for."""
    choices = chunk.get("choices")
    if not choices or body.get("logprobs") not in (None, False):
        return False
    (choice,) = choices
    return not (choice.get("finish_reason") or choice.get("text") or choice.get("delta"))
