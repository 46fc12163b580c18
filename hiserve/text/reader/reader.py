"""Tokens of one choice to thoughts, content and calls, by the format of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.text.reader.buffer import Kind, Reading, ReplyBuffer
from hiserve.text.reader.calls import CallReader
from hiserve.text.reader.marks import ReplySyntax
from hiserve.text.reader.messages import MessageReader
from hiserve.text.reader.output import StopTexts, TextDelta, named_end_token, visible_tokens
from hiserve.text.tokens.detokenizer import TokenBytes

# Looking a member of an enumeration up takes as long as a call, for each token.
CONTENT, RUNNING = Kind.CONTENT, FinishReason.RUNNING
TEXTS = (Kind.THOUGHT, CONTENT)


class ReplyStart(NamedTuple):
    """The place of a prompt at which a reply begins.

    Attributes:
        tools: OpenAI function tools that the model may call; None if calls are text.
        is_single: The first call ends the reply.
        is_thinking: The prompt ends within a thought.
        is_continued: The prompt ends within the content of the reply.
        call_id: Returns an id for a call to which the model gave none.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    is_single: bool = False
    is_thinking: bool = False
    is_continued: bool = False
    call_id: Callable[[], str] = str


class Reader:
    """Reads the tokens of one choice, for any chunking; text without a meaning in the format is content.

    Marks that are tokens of the model are marks as these tokens alone; the same text in other tokens is text. Stop texts are
    searched in content alone, as ``TextOutput`` searches them.

    Args:
        syntax: The model's spelling of thoughts and calls.
        token_bytes: Of the model's tokens.
        sampling: Has the stop texts and the shown tokens.
        prompt: The state at the end of the prompt, and the functions that may be called.

    Attributes:
        num_unread: Opening marks without a call after them, so that they are content.
        has_calls: Whether a call has ended.
    """

    def __init__(
        self,
        syntax: ReplySyntax,
        token_bytes: TokenBytes,
        sampling: SamplingParams,
        prompt: ReplyStart,
    ) -> None:
        self._syntax = syntax
        self._marks = syntax.stand_ins.keys()
        self._sampling = sampling
        self._detokenizer = token_bytes.detokenizer(skip_special=sampling.skip_special_tokens)
        self._stops = StopTexts(sampling)
        self._buffer = ReplyBuffer()
        self._reads_calls = prompt.tools is not None and syntax.row.reads_calls
        is_single = prompt.is_single
        self._calls = CallReader(
            syntax, self._buffer, prompt.tools or (), self._end_text, prompt.call_id, is_single=is_single
        )
        self._is_watched = is_single or bool(sampling.stop)  # it may end before its last token
        self._stop: str | None = None
        self._num_tokens = 0
        self._ended: TextDelta | None = None
        self.num_unread = 0
        self.has_calls = False
        self._machine: Generator[None, None, None] = (
            self._read_messages(prompt) if syntax.row.header[0] else self._read(prompt)
        )
        next(self._machine)

    def push(self, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
        """Adds the next tokens and returns their events; their content is the text of the delta. Content alone may have none.

        ``finish`` is as for ``TextOutput.push``.
        """
        if self._buffer.shown is not None and not (finish or self._is_watched) and self._marks.isdisjoint(tokens):
            return self._within(tokens)
        if self._ended is not None:
            return self._ended
        is_complete = finish is FinishReason.COMPLETE
        finish = FinishReason.STOP if is_complete else finish
        visible = tokens if is_complete else visible_tokens(tokens, finish, self._sampling)
        for i, token in enumerate(visible):
            self._add(token)
            if self._is_watched:
                next(self._machine, None)
                if self._buffer.is_stopped:
                    return self._end(i + 1, FinishReason.STOP, self._stop)
        if not finish:
            next(self._machine)
            return self._delta(len(tokens), finish, None)
        self._num_tokens += len(tokens) - len(visible)
        self._buffer.append(self._detokenizer.flush(), self._num_tokens - len(tokens) + len(visible))
        self._buffer.is_over, self._buffer.is_cut = True, finish is not FinishReason.STOP
        next(self._machine, None)
        if self._buffer.is_stopped:
            return self._end(len(tokens), FinishReason.STOP, self._stop)
        return self._end(len(tokens), finish, None if is_complete else named_end_token(tokens, finish, self._sampling))

    def _within(self, tokens: Sequence[int]) -> TextDelta:
        """Adds tokens within a thought or content, without the machine if they begin no mark: the most frequent case."""
        buffer, decode, first = self._buffer, self._detokenizer.push, self._num_tokens
        num_tokens = len(tokens)
        self._num_tokens = stop = first + num_tokens
        if num_tokens == 1:
            pieces = [text := decode(tokens)]
        else:
            pieces = [decode((token,)) for token in tokens]
            text = "".join(pieces)
            stop = first + max((at for at, piece in enumerate(pieces, 1) if piece), default=0)
        if text:
            if (events := buffer.passed_on(text, stop)) is not None:
                return TextDelta("" if events else text, num_tokens, RUNNING, None, events)
            for number, piece in enumerate(pieces, start=first + 1):
                buffer.append(piece, number)
            next(self._machine)
        return self._delta(num_tokens, RUNNING, None)

    def _add(self, token: int) -> None:
        mark = self._syntax.stand_ins.get(token)
        if mark is None:
            text = self._detokenizer.push((token,))
            self._num_tokens += 1
        else:
            self._buffer.append(self._detokenizer.flush(), self._num_tokens)
            self._num_tokens += 1
            text = mark
        self._buffer.append(text, self._num_tokens)

    def _end(self, num_tokens: int, finish: FinishReason, stop: str | int | None) -> TextDelta:
        self._buffer.end(self._num_tokens)
        delta = self._delta(num_tokens, finish, stop)
        self._ended = TextDelta("", 0, finish, stop)
        return delta

    def _delta(self, num_tokens: int, finish: FinishReason, stop: str | int | None) -> TextDelta:
        events = self._buffer.take()
        if len(events) == 1 and events[0].kind in TEXTS:  # the common case
            text = events[0].text if events[0].kind is Kind.CONTENT else ""
            return TextDelta(text, num_tokens, finish, stop, events)
        self.has_calls = self.has_calls or any(event.kind is Kind.CALL_END for event in events)
        text = "".join([event.text for event in events if event.kind is Kind.CONTENT])
        return TextDelta(text, num_tokens, finish, stop, events)

    def _read(self, prompt: ReplyStart) -> Generator[None, None, None]:
        """Reads texts and calls until the end of the reply."""
        syntax, buffer = self._syntax, self._buffer
        searches = syntax.with_calls if self._reads_calls else syntax.without_calls
        kind = Kind.THOUGHT if prompt.is_thinking else Kind.CONTENT
        yield
        if not (prompt.is_thinking or prompt.is_continued):
            kind = yield from self._begin()
        while True:
            is_thought = kind is Kind.THOUGHT
            search = searches.in_thought if is_thought else searches.in_content
            found = yield from buffer.show_until(kind, search, syntax.shown if is_thought else self._content)
            if found is None:
                break
            buffer.close(kind)
            if found[1] in syntax.thought:
                kind = yield from self._turn(found.end(), is_thought=is_thought)
            elif (yield from self._calls.read(found[1], found.end())):
                kind = yield from self._after_calls()
            else:
                self.num_unread += 1
                size = found.end()
                shown = syntax.shown(buffer.text[:size])
                buffer.emit(kind, size, shown if is_thought else self._content(shown))
        self._end_text()

    def _read_messages(self, prompt: ReplyStart) -> Generator[None, None, None]:
        """Reads messages with headers until the end of the reply."""
        messages = MessageReader(
            self._syntax,
            self._buffer,
            self._content,
            self._end_text,
            prompt.call_id if self._reads_calls else None,
            is_single=prompt.is_single,
        )
        yield
        kind = Kind.THOUGHT if prompt.is_thinking else Kind.CONTENT if prompt.is_continued else None
        yield from messages.read(kind)
        self.num_unread = messages.num_unread
        self._end_text()

    def _begin(self) -> Reading[Kind]:
        """Reads a thought's mark or a call without a mark at the start of a reply."""
        syntax, buffer = self._syntax, self._buffer
        at = yield from buffer.past(0)
        is_bare = self._reads_calls and syntax.row.is_bare
        mark = yield from buffer.starts(at, syntax.thought[0], "{" if is_bare else "")
        if mark == "{" and (yield from self._calls.read("", at)):
            return (yield from self._after_calls())
        if mark in ("", "{"):
            return Kind.CONTENT
        return (yield from self._turn(at + len(mark), is_thought=False))

    def _turn(self, size: int, *, is_thought: bool) -> Reading[Kind]:
        """Reads a mark of a thought, of which ``size`` characters are left, and the line breaks that belong to it."""
        after_opening, _, after_closing = self._syntax.row.thought_lines
        self._end_text()
        self._buffer.drop(size)
        most = after_closing if is_thought else after_opening
        self._buffer.drop((yield from self._buffer.past(0, "\n", most)))
        return Kind.CONTENT if is_thought else Kind.THOUGHT

    def _after_calls(self) -> Reading[Kind]:
        """Drops white space between calls, and after the last one."""
        buffer = self._buffer
        at = yield from buffer.past(0)
        if at == len(buffer.text) or (yield from buffer.starts(at, self._syntax.opening)):
            buffer.drop(at)
        return Kind.CONTENT

    def _content(self, text: str) -> str:
        """Returns the part of the content that is certain, stop texts considered."""
        text = self._syntax.shown(text)
        if self._sampling.stop:
            text, self._stop = self._stops.release(text, self._num_tokens)
            self._buffer.is_stopped = self._stop is not None
        return text

    def _end_text(self) -> None:
        """Ends a text: the possible start of a stop text is content."""
        if held := self._stops.flush():
            self._buffer.emit(Kind.CONTENT, 0, held)
