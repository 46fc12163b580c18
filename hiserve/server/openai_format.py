"""The JSON of OpenAI's replies, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from hiserve.server.generation import Choices, Generation, OutputDelta, nothing
from hiserve.server.logprobs import Spell, TextLogprobs, chat_logprobs, prompt_logprobs
from hiserve.server.openai_types import ChatOptions, CompletionRequest, OpenAIFields
from hiserve.server.reply_format import usage
from hiserve.server.streaming import DONE, EventHead
from hiserve.text.detokenizer import TokenBytes

Word = Callable[[Callable[[], dict[str, Any] | None]], Awaitable[dict[str, Any] | None]]


class ReplyFormatter(Protocol):
    """Words one reply. Lives as long as the reply.

    Attributes:
        chunk_head: What each chunk of a stream begins with.
    """

    chunk_head: dict[str, Any]

    def whole(self, choices: Choices) -> dict[str, Any]:
        """Returns the reply that is not streamed."""

    def opening(self, generation: Generation) -> dict[str, Any] | None:
        """Returns the rest of the chunk before a choice's first piece, or None when there is none."""

    def piece(self, output_delta: OutputDelta) -> dict[str, Any] | None:
        """Returns the rest of the chunk for one piece, or None when the piece has nothing to show."""


class ChatFormatter:
    """Words one chat completion.

    Args:
        head: As ``reply_format.envelope`` makes it.
        request: What the reply shows.
        spell: Spells a token.

    Attributes:
        chunk_head: What each chunk of a stream begins with.
    """

    def __init__(self, head: dict[str, Any], request: ChatOptions, spell: Spell) -> None:
        self._whole_head = {**head, "object": "chat.completion"}
        self.chunk_head = {**head, "object": "chat.completion.chunk"}
        self._has_token_ids = bool(request.return_token_ids)
        self._num_top = request.num_top
        self._num_prompt_top = request.prompt_logprobs
        self._shows_tokens = self._has_token_ids or self._num_top is not None
        self._spell = spell

    def whole(self, choices: Choices) -> dict[str, Any]:
        """Returns the reply that is not streamed."""
        shown = []
        for output_delta in map(Generation.whole, choices.generations):
            shown.append(
                self._choice(output_delta, message={"role": "assistant", "content": output_delta.text, "refusal": None})
            )
        prompt = self._prompt(choices.generations[0])
        return {**self._whole_head, **prompt, "choices": shown, "usage": usage(choices)}

    def opening(self, generation: Generation) -> dict[str, Any]:
        """Returns the rest of the chunk with the role, before a choice's first piece."""
        choice = self._choice(nothing(generation.choice), delta={"role": "assistant", "content": ""})
        return {"choices": [choice], **self._prompt(generation)}

    def piece(self, output_delta: OutputDelta) -> dict[str, Any] | None:
        """Returns the rest of the chunk for one piece, or None when the piece has nothing to show."""
        if not (output_delta.text or output_delta.finish or self._shows_tokens):
            return None
        return {
            "choices": [self._choice(output_delta, delta={"content": output_delta.text} if output_delta.text else {})]
        }

    def _choice(self, output_delta: OutputDelta, **content: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output_delta.choice,
            **content,
            "logprobs": None,
            "finish_reason": output_delta.finish.text,
        }
        if output_delta.finish:
            choice["stop_reason"] = output_delta.stop
        if self._has_token_ids:
            choice["token_ids"] = output_delta.tokens
        if self._num_top is not None and output_delta.tokens:
            choice["logprobs"] = chat_logprobs(output_delta, self._num_top, self._spell)
        return choice

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        """Returns what is shown of the prompt, with the first choice."""
        shown: dict[str, Any] = {}
        if generation.choice != 0:
            return shown
        if self._has_token_ids:
            shown["prompt_token_ids"] = generation.prompt.tolist()
        if self._num_prompt_top is not None:
            shown["prompt_logprobs"] = prompt_logprobs(generation, self._num_prompt_top, self._spell)
        return shown


class CompletionFormatter:
    """Words one text completion.

    Args:
        head: As ``reply_format.envelope`` makes it.
        request: What the reply shows.
        token_bytes: Of the model's tokens.
        prompts: Text of each prompt, for the echo; None for a prompt that was given as token ids.

    Attributes:
        chunk_head: What each chunk of a stream begins with.
    """

    def __init__(
        self, head: dict[str, Any], request: CompletionRequest, token_bytes: TokenBytes, prompts: Sequence[str | None]
    ) -> None:
        self.chunk_head = {**head, "object": "text_completion"}
        self._request = request
        self._num_top = request.num_top
        self._token_bytes = token_bytes
        self._prompts = prompts
        self._has_opening = request.echo or request.return_token_ids or request.prompt_logprobs is not None
        self._logprobs: dict[int, TextLogprobs] = {}

    def whole(self, choices: Choices) -> dict[str, Any]:
        """Returns the reply that is not streamed."""
        shown = []
        for generation in choices.generations:
            opening = self._open(generation)
            reply = self._choice(generation.whole())
            reply["text"] = opening["text"] + reply["text"]
            if opening["logprobs"]:
                before, after = opening["logprobs"], reply["logprobs"]
                reply["logprobs"] = {name: before[name] + after[name] for name in before}
            shown.append({**opening, **reply})
        return {**self.chunk_head, "choices": shown, "usage": usage(choices)}

    def opening(self, generation: Generation) -> dict[str, Any] | None:
        """Returns the rest of the chunk before a choice's first piece, or None when there is none."""
        opening = self._open(generation)
        return {"choices": [opening]} if self._has_opening else None

    def piece(self, output_delta: OutputDelta) -> dict[str, Any] | None:
        """Returns the rest of the chunk for one piece, or None when the piece has nothing to show."""
        is_shown = (
            output_delta.text or output_delta.finish or self._request.return_token_ids or self._num_top is not None
        )
        return {"choices": [self._choice(output_delta)]} if is_shown else None

    def _choice(self, output_delta: OutputDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output_delta.choice,
            "text": output_delta.text,
            "logprobs": None,
            "finish_reason": output_delta.finish.text,
        }
        if output_delta.finish:
            choice["stop_reason"] = output_delta.stop
        if self._request.return_token_ids:
            choice["token_ids"] = output_delta.tokens
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs[output_delta.choice].of_piece(output_delta)
        return choice

    def _open(self, generation: Generation) -> dict[str, Any]:
        """Returns what is shown of a choice's prompt, and gets ready to word its reply."""
        request, spell = self._request, self._token_bytes.bytes_of
        text, logprobs = self._echo(generation) if request.echo else ("", None)
        if self._num_top is not None:
            detokenizer = self._token_bytes.detokenizer(skip_special=request.skip_special_tokens is not False)
            self._logprobs[generation.choice] = TextLogprobs(self._num_top, spell, detokenizer, len(text))
        opening: dict[str, Any] = {
            "index": generation.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if request.return_token_ids:
            opening |= {"prompt_token_ids": generation.prompt.tolist(), "token_ids": []}
        if request.prompt_logprobs is not None:
            opening["prompt_logprobs"] = prompt_logprobs(generation, request.prompt_logprobs, spell)
        return opening

    def _echo(self, generation: Generation) -> tuple[str, dict[str, list[Any]] | None]:
        """Returns the prompt's text and, if asked for, what is known of its tokens."""
        decoder, counter = (self._token_bytes.detokenizer(skip_special=False) for _ in range(2))
        decoded = decoder.push(generation.prompt.tolist()) + decoder.flush()
        given = self._prompts[generation.choice // self._request.num_choices]
        text = decoded if given is None else given
        if self._num_top is None:
            return text, None
        # What the tokenizer put in front of a text is among the tokens, but not in the text.
        offset = len(text) - len(decoded)
        return text, TextLogprobs(self._num_top, self._token_bytes.bytes_of, counter, offset).of_prompt(generation)


async def events(
    pieces: AsyncGenerator[OutputDelta, None],
    choices: Choices,
    formatter: ReplyFormatter,
    request: OpenAIFields,
    word: Word,
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a reply, those of one piece together."""
    unopened = {generation.choice: generation for generation in choices.generations}
    head = EventHead(formatter.chunk_head)
    so_far: dict[str, Any] = {"usage": None} if request.has_usage else {}
    async with aclosing(pieces):
        async for output_delta in pieces:
            generation = unopened.pop(output_delta.choice, None)
            opening = await _opening(formatter, generation, word) if generation else None
            shown = formatter.piece(output_delta)
            if request.has_usage and request.has_running_usage:
                so_far = {"usage": usage(choices)}
            events = head.event({**opening, **so_far}) if opening else b""
            if shown:
                events += head.event({**shown, **so_far})
            if events:
                yield events
    yield (head.event({"choices": [], "usage": usage(choices)}) if request.has_usage else b"") + DONE


async def _opening(formatter: ReplyFormatter, generation: Generation, word: Word) -> dict[str, Any] | None:
    opening = partial(formatter.opening, generation)
    return await word(opening) if generation.scorer.has_many_prompt_scores else opening()
