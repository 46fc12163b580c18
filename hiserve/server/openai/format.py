"""The JSON of OpenAI's replies, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from hiserve.server.http.streaming import DONE, EventHead
from hiserve.server.openai.types import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatDeltaChoice,
    ChatMessage,
    ChatOptions,
    Chunk,
    Completion,
    CompletionRequest,
    MessageCall,
    MessageFunction,
    MessageInput,
    OpenAIFields,
    TextChoice,
)
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import Usage, usage
from hiserve.server.reply.generation import Generation, OutputDelta, nothing
from hiserve.server.reply.logprobs import ChatScores, Spell, TextLogprobs, TextScores, chat_logprobs, prompt_logprobs
from hiserve.text.custom_tools import InputReader
from hiserve.text.reader.buffer import Event, Kind, called, thought
from hiserve.text.tokens.detokenizer import TokenBytes

CONTENT = Kind.CONTENT  # an attribute of an enum costs time for each token
Word = Callable[[Callable[[], Chunk | None]], Awaitable[Chunk | None]]


class CustomEvents:
    """The events of one choice, with inputs in place of the arguments of custom tools.

    Args:
        names: Of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._reader: InputReader | None = None  # of the call that has not ended

    def read(self, events: Sequence[Event], *, is_last: bool) -> Sequence[Event]:
        """Returns the events to show for some of the reader's; ``is_last``: no others follow."""
        made: list[Event] = []
        for event in events:
            if event.kind is Kind.ARGUMENTS and self._reader is not None:
                made.append(event._replace(text=self._reader.push(event.text)))
                continue
            if event.kind is Kind.CALL_END:
                made += self._rest(event.start)
            if event.kind is Kind.CALL and event.text in self._names:
                self._reader = InputReader()
            made.append(event)
        return [*made, *self._rest(made[-1].stop if made else 0)] if is_last else made

    def _rest(self, token: int) -> list[Event]:
        """Returns the rest of the input of the call that has not ended, if there is one."""
        text, self._reader = "" if self._reader is None else self._reader.end(), None
        return [Event(Kind.ARGUMENTS, text, token, token)] if text else []


class ReplyFormatter(Protocol):
    """Formats one reply.

    Attributes:
        chunk_head: The fields that each chunk of a stream begins with.
    """

    chunk_head: dict[str, Any]

    def whole(self, choices: Choices) -> ChatCompletion | Completion:
        """Returns the reply that is not streamed."""

    def opening(self, generation: Generation) -> Chunk | None:
        """Returns the chunk before a choice's first delta, or None when there is none."""

    def resume(self, generation: Generation, shown: OutputDelta) -> None:
        """Begins a choice after output that its client has, its opening included."""

    def chunk(self, output_delta: OutputDelta) -> Chunk | None:
        """Returns the chunk for one delta, or None when the delta has nothing to show."""


class ChatFormatter:
    """Formats one chat completion.

    Args:
        head: As ``reply.format.envelope`` makes it.
        request: Says what the reply shows.
        spell: Spells a token.
        custom: Names of the custom tools.

    Attributes:
        chunk_head: The fields that each chunk of a stream begins with.
    """

    def __init__(
        self, head: dict[str, Any], request: ChatOptions, spell: Spell, custom: Collection[str] = frozenset()
    ) -> None:
        self._head = head
        self.chunk_head = {**head, "object": "chat.completion.chunk"}
        self._has_token_ids = bool(request.return_token_ids)
        self._num_top = request.num_top
        self._num_prompt_top = request.prompt_logprobs
        self._shows_tokens = self._has_token_ids or self._num_top is not None
        self._spell = spell
        self._num_calls: dict[int, int] = {}  # sent so far, by choice
        self._custom = custom
        self._readers: dict[int, CustomEvents] = {}  # by choice
        self._custom_calls: set[tuple[int, int]] = set()  # choice and index of each that was sent

    def whole(self, choices: Choices) -> ChatCompletion:
        """Returns the reply that is not streamed."""
        shown = [
            ChatChoice(
                delta.choice,
                self._message(delta),
                self._logprobs(delta),
                delta.reason,
                delta.stop,
                delta.tokens if self._has_token_ids else UNSET,
            )
            for delta in map(Generation.whole, choices.generations)
        ]
        return ChatCompletion(**self._head, **self._prompt(choices.generations[0]), choices=shown, usage=usage(choices))

    def opening(self, generation: Generation) -> Chunk:
        """Returns the chunk with the role, before a choice's first delta."""
        choice = self._delta(nothing(generation.choice), ChatDelta("assistant", ""))
        return Chunk([choice], **(self._prompt(generation) if generation.choice == 0 else {}))

    def resume(self, _: Generation, shown: OutputDelta) -> None:
        """Begins a choice after output that its client has: the indices of its calls go on."""
        self._call_deltas(shown.choice, self._events(shown))

    def chunk(self, output_delta: OutputDelta) -> Chunk | None:
        """Returns the chunk for one delta, or None when the delta has nothing to show."""
        shown = ChatDelta(content=output_delta.text or UNSET)
        events = self._events(output_delta)
        if events and (len(events) > 1 or events[0].kind is not CONTENT):
            shown.reasoning_content = thought(events) or UNSET
            shown.tool_calls = self._call_deltas(output_delta.choice, events) or UNSET
        is_empty = shown.content is UNSET and shown.reasoning_content is UNSET and shown.tool_calls is UNSET
        if is_empty and not (output_delta.finish or self._shows_tokens):
            return None
        return Chunk([self._delta(output_delta, shown)])

    def _delta(self, output_delta: OutputDelta, shown: ChatDelta) -> ChatDeltaChoice:
        return ChatDeltaChoice(
            output_delta.choice,
            shown,
            self._logprobs(output_delta),
            output_delta.reason,
            output_delta.stop if output_delta.finish else UNSET,
            output_delta.tokens if self._has_token_ids else UNSET,
        )

    def _message(self, delta: OutputDelta) -> ChatMessage:
        """Returns the message of a choice; one with calls may have no content."""
        message, events = ChatMessage("assistant", delta.text), self._events(delta)
        if text := thought(events):
            message.reasoning_content = text
        calls = called(events)
        if calls:
            message.content = delta.text or None
            message.tool_calls = [self._call(*call) for call in calls.values()]
        return message

    def _call(self, call_id: str, name: str, arguments: str) -> MessageCall:
        if name in self._custom:
            return MessageCall(id=call_id, type="custom", custom=MessageInput(name, arguments))
        return MessageCall(MessageFunction(name, arguments), id=call_id, type="function")

    def _call_delta(self, choice: int, index: int, call_id: str, name: str, arguments: str) -> MessageCall:
        """Returns the delta of a call; the first one has its id and name."""
        if name:
            if name in self._custom:
                self._custom_calls.add((choice, index))
            return msgspec.structs.replace(self._call(call_id, name, arguments), index=index)
        if (choice, index) in self._custom_calls:
            return MessageCall(index=index, custom=MessageInput(input=arguments))
        return MessageCall(MessageFunction(arguments=arguments), index)

    def _call_deltas(self, choice: int, events: Sequence[Event]) -> list[MessageCall]:
        """Returns what events add to the calls of a choice."""
        first = self._num_calls.get(choice, 0)
        calls = called(events, first)
        self._num_calls[choice] = max((index + 1 for index in calls), default=first)
        return [self._call_delta(choice, index, *call) for index, call in calls.items()]

    def _events(self, delta: OutputDelta) -> Sequence[Event]:
        """Returns the events of a delta, with inputs in place of the arguments of custom tools."""
        if not self._custom:
            return delta.events
        reader = self._readers.setdefault(delta.choice, CustomEvents(self._custom))
        return reader.read(delta.events, is_last=bool(delta.finish))

    def _logprobs(self, output_delta: OutputDelta) -> ChatScores | None:
        if self._num_top is None or not output_delta.tokens:
            return None
        return chat_logprobs(output_delta, self._num_top, self._spell)

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        """Returns the fields of the prompt, with the first choice."""
        shown: dict[str, Any] = {}
        if self._has_token_ids:
            shown["prompt_token_ids"] = generation.prompt.tolist()
        if self._num_prompt_top is not None:
            shown["prompt_logprobs"] = prompt_logprobs(generation, self._num_prompt_top, self._spell)
        return shown


class CompletionFormatter:
    """Formats one text completion.

    Args:
        head: As ``reply.format.envelope`` makes it.
        request: Says what the reply shows.
        token_bytes: Of the model's tokens.
        prompts: Text of each prompt, for the echo; None for a prompt that was given as token ids.

    Attributes:
        chunk_head: The fields that each chunk of a stream begins with.
    """

    def __init__(
        self, head: dict[str, Any], request: CompletionRequest, token_bytes: TokenBytes, prompts: Sequence[str | None]
    ) -> None:
        self._head = head
        self.chunk_head = {**head, "object": "text_completion"}
        self._request = request
        self._num_top = request.num_top
        self._token_bytes = token_bytes
        self._prompts = prompts
        self._has_opening = request.echo or request.return_token_ids or request.prompt_logprobs is not None
        self._logprobs: dict[int, TextLogprobs] = {}

    def whole(self, choices: Choices) -> Completion:
        """Returns the reply that is not streamed."""
        shown = []
        for generation in choices.generations:
            before, choice = self._open(generation), self._choice(generation.whole())
            choice.text = before.text + choice.text
            if before.logprobs and choice.logprobs:
                choice.logprobs = before.logprobs + choice.logprobs
            choice.prompt_token_ids, choice.prompt_logprobs = before.prompt_token_ids, before.prompt_logprobs
            shown.append(choice)
        return Completion(**self._head, choices=shown, usage=usage(choices))

    def opening(self, generation: Generation) -> Chunk | None:
        """Returns the chunk before a choice's first delta, or None when there is none."""
        opening = self._open(generation)
        return Chunk([opening]) if self._has_opening else None

    def resume(self, generation: Generation, shown: OutputDelta) -> None:
        """Begins a choice after output that its client has, its echo included."""
        self._open(generation)
        if self._num_top is not None:
            self._logprobs[generation.choice].skip(shown.tokens)

    def chunk(self, output_delta: OutputDelta) -> Chunk | None:
        """Returns the chunk for one delta, or None when the delta has nothing to show."""
        shows_tokens = self._request.return_token_ids or self._num_top is not None
        return Chunk([self._choice(output_delta)]) if output_delta.text or output_delta.finish or shows_tokens else None

    def _choice(self, output_delta: OutputDelta) -> TextChoice:
        index, is_scored = output_delta.choice, self._num_top is not None
        return TextChoice(
            index,
            output_delta.text,
            self._logprobs[index].of_delta(output_delta) if is_scored else None,
            output_delta.finish.text,
            token_ids=output_delta.tokens if self._request.return_token_ids else UNSET,
            stop_reason=output_delta.stop if output_delta.finish else UNSET,
        )

    def _open(self, generation: Generation) -> TextChoice:
        """Returns the choice with its echoed prompt, and begins its text and scores."""
        request, spell = self._request, self._token_bytes.bytes_of
        text, logprobs = self._echo(generation) if request.echo else ("", None)
        if self._num_top is not None:
            detokenizer = self._token_bytes.detokenizer(skip_special=request.skip_special_tokens is not False)
            self._logprobs[generation.choice] = TextLogprobs(self._num_top, spell, detokenizer, len(text))
        opening = TextChoice(generation.choice, text, logprobs, None)
        if request.return_token_ids:
            opening.prompt_token_ids, opening.token_ids = generation.prompt.tolist(), []
        if request.prompt_logprobs is not None:
            opening.prompt_logprobs = prompt_logprobs(generation, request.prompt_logprobs, spell)
        return opening

    def _echo(self, generation: Generation) -> tuple[str, TextScores | None]:
        """Returns the prompt's text and, if requested, the scores of its tokens."""
        decoder, counter = (self._token_bytes.detokenizer(skip_special=False) for _ in range(2))
        decoded = decoder.push(generation.prompt.tolist()) + decoder.flush()
        given = self._prompts[generation.choice // self._request.num_choices]
        text = decoded if given is None else given
        if self._num_top is None:
            return text, None
        # The tokens include those that the tokenizer adds before the text; the text does not.
        offset = len(text) - len(decoded)
        return text, TextLogprobs(self._num_top, self._token_bytes.bytes_of, counter, offset).of_prompt(generation)


async def events(
    deltas: AsyncGenerator[OutputDelta, None],
    choices: Choices,
    formatter: ReplyFormatter,
    request: OpenAIFields,
    word: Word,
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a reply, those of one delta together."""
    unopened = {generation.choice: generation for generation in choices.generations if not generation.num_resumed}
    head = EventHead(formatter.chunk_head)
    has_usage, has_running_usage = request.has_usage, request.has_running_usage
    so_far: Usage | UnsetType | None = None if has_usage else UNSET
    async with aclosing(deltas):
        async for output_delta in deltas:
            generation = unopened.pop(output_delta.choice, None)
            opening = await _opening(formatter, generation, word) if generation else None
            if has_running_usage:
                so_far = usage(choices)
            shown = b""
            for chunk in (opening, formatter.chunk(output_delta)):
                if chunk is not None:
                    chunk.usage = so_far
                    shown += head.event(chunk)
            if shown:
                yield shown
    yield (head.event(Chunk([], usage=usage(choices))) if has_usage else b"") + DONE


async def _opening(formatter: ReplyFormatter, generation: Generation, word: Word) -> Chunk | None:
    opening = partial(formatter.opening, generation)
    return await word(opening) if generation.scorer.has_many_prompt_scores else opening()
