"""The events of each protocol's streams, as a gateway reads them: their tokens and ends, and what it shows of an engine that took over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Chunk = dict[str, Any]
Known = Sequence[list[int] | None]  # tokens of each choice so far; None of one that has ended


class Said(NamedTuple):
    """The facts of an event.

    Attributes:
        choice: Index of its choice; None if it is of none.
        tokens: All new ones of the choice since the last event with some.
        is_end: The choice has ended.
        is_last: The stream ends with it.
    """

    choice: int | None
    tokens: list[int]
    is_end: bool = False
    is_last: bool = False


class StreamEvents(Protocol):
    """Reads the events of one stream, from one engine after the other.

    Attributes:
        wanted: Fields of the request that make the engine show tokens.
    """

    wanted: Mapping[str, Any]

    def read(self, chunk: Chunk, known: Known) -> Said:
        """Returns the facts of an event; ``known`` are the tokens before it."""

    def mend(self, chunk: Chunk) -> bool:
        """Makes an event one of the first engine, without what its client did not ask for; False if nothing is left of it."""

    def broke(self) -> None:
        """Notes that the next event is one of another engine."""


class OpenAIEvents:
    """Events of chats and completions.

    Args:
        body: Of the request.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.wanted: Mapping[str, Any] = {"return_token_ids": True}
        self._shows_tokens = bool(body.get("return_token_ids"))
        self._has_scores = body.get("logprobs") not in (None, False)
        self._head: Chunk = {}  # fields that each event of the first engine has

    def read(self, chunk: Chunk, known: Known) -> Said:
        """Returns the facts of an event; those of one choice, or of the usage."""
        for choice in chunk.get("choices", ()):
            return Said(choice["index"], choice.get("token_ids") or [], bool(choice.get("finish_reason")))
        return Said(None, [], is_last="error" in chunk)

    def mend(self, chunk: Chunk) -> bool:
        """Gives the event the first engine's name and time."""
        for name in ("id", "created", "system_fingerprint"):
            if name in chunk:
                chunk[name] = self._head.setdefault(name, chunk[name])
        if self._shows_tokens:
            return True
        choices = chunk.get("choices", ())
        for part in (chunk, *choices):
            part.pop("token_ids", None)
            part.pop("prompt_token_ids", None)
        shown = ("finish_reason", "text", "delta")
        return self._has_scores or not choices or any(choice.get(name) for choice in choices for name in shown)

    def broke(self) -> None:
        """Has nothing to note."""


class NativeEvents:
    """Events of ``/generate``, each with the whole of its choice so far but for scores of what another engine generated."""

    wanted: Mapping[str, Any] = {}
    _SCORES = ("output_token_logprobs", "output_top_logprobs")
    _OF_PROMPT = ("input_token_logprobs", "input_top_logprobs")

    def __init__(self, _: Mapping[str, Any]) -> None:
        self._latest: dict[int, Chunk] = {}  # by choice, the facts of the latest event before its end
        self._before: dict[int, Chunk] = {}  # and of the last such event of the engine before

    def read(self, chunk: Chunk, known: Known) -> Said:
        """Returns the facts of an event."""
        if "meta_info" not in chunk:
            return Said(None, [], is_last=True)  # an error
        choice, ids = chunk.get("index", 0), chunk["output_ids"]
        return Said(choice, ids[len(known[choice] or ()) :], chunk["meta_info"]["finish_reason"] is not None)

    def mend(self, chunk: Chunk) -> bool:
        """Adds the scores that the engine before has shown."""
        if facts := chunk.get("meta_info"):
            choice = chunk.get("index", 0)
            before = self._before.get(choice, {})
            for name in self._SCORES:
                if name in facts:
                    facts[name] = before.get(name, []) + facts[name]
            facts |= {name: before[name] for name in self._OF_PROMPT if name in before}
            if facts["finish_reason"] is None:
                self._latest[choice] = facts
        return True

    def broke(self) -> None:
        """Keeps the scores of what was shown."""
        self._before |= self._latest


class BlockEvents:
    """Events of messages."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.wanted: Mapping[str, Any] = {"return_token_ids": True}
        self._shows_tokens = bool(body.get("return_token_ids"))

    def read(self, chunk: Chunk, known: Known) -> Said:
        """Returns the facts of an event."""
        kind = chunk.get("type")
        return Said(0, chunk.get("token_ids") or [], kind == "message_delta", kind in ("message_stop", "error"))

    def mend(self, chunk: Chunk) -> bool:
        """Takes tokens out; nothing else tells one engine from another after the first event."""
        if not self._shows_tokens:
            chunk.pop("token_ids", None)
        return True

    def broke(self) -> None:
        """Has nothing to note."""


class ItemEvents(BlockEvents):
    """Events of responses."""

    _LAST = ("response.completed", "response.incomplete", "response.failed")

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self._head: Chunk = {}  # of the first engine's response
        self._items: dict[int, Chunk] = {}  # by their place: their names at the engine that began them

    def read(self, chunk: Chunk, known: Known) -> Said:
        """Returns the facts of an event."""
        return Said(0, chunk.get("token_ids") or [], is_last=chunk.get("type") in self._LAST or "error" in chunk)

    def mend(self, chunk: Chunk) -> bool:
        """Gives response and items the names that they had at first."""
        if response := chunk.get("response"):
            for name in ("id", "created_at"):
                response[name] = self._head.setdefault(name, response[name])
            for place, item in enumerate(response["output"]):
                self._name(place, item)
        if (index := chunk.get("output_index")) is not None:
            names = self._name(index, chunk.get("item", {}))
            if "item_id" in chunk:
                chunk["item_id"] = names.setdefault("id", chunk["item_id"])
        return super().mend(chunk)

    def _name(self, index: int, item: Chunk) -> Chunk:
        names = self._items.setdefault(index, {})
        for name in ("id", "call_id"):
            if name in item:
                item[name] = names.setdefault(name, item[name])
        return names
