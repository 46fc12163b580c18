"""Tokens of one choice to the text that its reader receives: stop texts, end tokens, special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.text.reader.buffer import Event
from hiserve.text.tokens.detokenizer import TokenBytes


class TextDelta(NamedTuple):
    """The text that some tokens add.

    Attributes:
        text: Characters that are certain now; may be empty.
        num_tokens: How many of the tokens count: all, or those up to the one that completed a stop text.
        finish: RUNNING until the end; STOP also when a stop text ended the choice.
        matched_stop: The stop text or the entry of ``stop_token_ids`` that ended the choice. None for the
            model's own end tokens and for every other end.
        events: Where the text was read by the format of a reply; empty otherwise, and where it is content alone.
    """

    text: str
    num_tokens: int
    finish: FinishReason
    matched_stop: str | int | None
    events: Sequence[Event] = ()


class ReplyOutput(Protocol):
    """Converts the tokens of one choice to the text, thoughts and calls that its reader receives, for any chunking.

    Attributes:
        num_unread: Marks of calls so far without a call after them.
    """

    num_unread: int

    def push(self, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
        """Adds the next tokens and returns their delta; an empty one after the end of the choice.

        ``finish`` is RUNNING until the engine ends the choice. If it is STOP, the last token is the one that ended it.
        """


class TextOutput:
    """Converts the tokens of one choice to text, for any chunking.

    The text ends at the first place where a stop text is complete. If several are complete there, the
    longest counts: of ``"bc"`` and ``"abc"`` the second. A text that begins with another stop text
    (``"ab"``, ``"abc"``) can therefore end a choice only while ``min_tokens`` suppresses the other.
    The token that ends a choice counts as a token but is not in the text, unless the stop is to be included.
    """

    __slots__ = ("_detokenizer", "_ended", "_num_tokens", "_sampling", "_stops", "num_unread")

    def __init__(self, token_bytes: TokenBytes, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._detokenizer = token_bytes.detokenizer(skip_special=sampling.skip_special_tokens)
        self._stops = StopTexts(sampling)
        self.num_unread = 0  # it reads none
        self._num_tokens = 0
        self._ended: TextDelta | None = None

    def push(self, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
        """Adds the next tokens and returns their text; after the end of the choice, an empty delta.

        ``finish`` is RUNNING until the engine ends the choice. If it is STOP, the last token is the one that ended it; if
        COMPLETE, which becomes STOP, it is the last of the text.
        """
        if self._ended is not None:
            return self._ended
        if finish is FinishReason.COMPLETE:
            shown = self.push(tokens, FinishReason.LENGTH)._replace(finish=FinishReason.STOP)  # every token is shown
            self._ended = shown._replace(text="", num_tokens=0)
            return shown
        shown = self._scan(tokens, finish) if self._sampling.stop else self._plain(tokens, finish)
        if shown.finish:
            self._ended = shown._replace(text="", num_tokens=0)
        return shown

    def _plain(self, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
        if not finish:
            return TextDelta(self._detokenizer.push(tokens), len(tokens), finish, None)
        text = self._detokenizer.push(visible_tokens(tokens, finish, self._sampling)) + self._detokenizer.flush()
        return TextDelta(text, len(tokens), finish, named_end_token(tokens, finish, self._sampling))

    def _scan(self, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
        """Searches stop texts token by token, to find the token that completes a match."""
        texts = []
        visible = visible_tokens(tokens, finish, self._sampling)
        for i, token in enumerate(visible):
            self._num_tokens += 1
            text, stop = self._stops.release(self._detokenizer.push((token,)), self._num_tokens)
            texts.append(text)
            if stop is not None:
                return TextDelta("".join(texts), i + 1, FinishReason.STOP, stop)
        if not finish:
            return TextDelta("".join(texts), len(tokens), finish, None)
        self._num_tokens += len(tokens) - len(visible)
        text, stop = self._stops.release(self._detokenizer.flush(), self._num_tokens)
        texts.append(text)
        if stop is not None:
            return TextDelta("".join(texts), len(tokens), FinishReason.STOP, stop)
        return TextDelta(
            "".join(texts) + self._stops.flush(), len(tokens), finish, named_end_token(tokens, finish, self._sampling)
        )


def visible_tokens(tokens: Sequence[int], finish: FinishReason, sampling: SamplingParams) -> Sequence[int]:
    """Returns the tokens without the one that ended the choice, unless the stop is to be included."""
    is_cut = finish is FinishReason.STOP and not sampling.include_stop_str_in_output
    return tokens[:-1] if is_cut else tokens


def named_end_token(tokens: Sequence[int], finish: FinishReason, sampling: SamplingParams) -> int | None:
    """Returns the entry of ``stop_token_ids`` that ended the choice; None for another end."""
    is_named = finish is FinishReason.STOP and tokens and tokens[-1] in sampling.stop_token_ids
    return tokens[-1] if is_named else None


class StopTexts:
    """Searches the stop texts of a request in a stream of text."""

    __slots__ = ("_held", "_sampling", "_stops")

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._stops = [_StopText(text) for text in sampling.stop]
        self._held = ""  # may become a stop text

    def release(self, new: str, num_tokens: int) -> tuple[str, str | None]:
        """Adds text; returns the part of it and of the held text that is certain, and the stop text that ends it.

        ``num_tokens`` were generated so far; stop texts do not count before ``min_tokens``.
        """
        if not new:
            return "", None
        is_early = num_tokens < self._sampling.min_tokens
        matches = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.advance(new, is_early))]
        text = self._held + new
        if matches:
            end, _, stop_text = min(matches)
            end += len(self._held)
            return text[: end if self._sampling.include_stop_str_in_output else end - len(stop_text)], stop_text
        is_shown_anyway = self._sampling.include_stop_str_in_output
        num_held = 0 if is_shown_anyway else max(stop.num_matched for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """Returns the held text; the search begins anew."""
        text, self._held = self._held, ""
        for stop in self._stops:
            stop.num_matched = 0
        return text


class _StopText:
    """Searches one stop text in a stream (Knuth, Morris and Pratt, 1977).

    Attributes:
        text: The stop text.
        num_matched: Length of the longest end of the stream so far that is a prefix of the stop text.
    """

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # By length: the longest proper prefix of text[:length] that is also its end. Computed on demand, so that a
        # long stop text that never matches costs nothing.
        self._borders = [0, 0]

    def advance(self, new: str, is_early: bool) -> int:
        """Consumes the next characters; returns how many complete the first match, 0 without one.

        If ``is_early``, matches do not count.
        """
        at, text = 0, self.text
        while at < len(new):
            if not self.num_matched:  # the common case: skip to the first character
                at = new.find(text[0], at)
                if at < 0:
                    return 0
            self.num_matched = self._extended(self.num_matched, new[at])
            at += 1
            if self.num_matched == len(text):
                if not is_early:
                    return at
                self.num_matched = self._border(len(text))
        return 0

    def _extended(self, length: int, char: str) -> int:
        """Returns the length of the longest prefix of the text that ends ``text[:length] + char``."""
        while length and self.text[length] != char:
            length = self._border(length)
        return length + 1 if self.text[length] == char else 0

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) <= length:
            last = len(borders) - 1
            borders.append(self._extended(borders[last], self.text[last]))
        return borders[length]
