"""The JSON of text completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hiserve.server.choices import Choices
from hiserve.server.generation import Generation, OutputDelta
from hiserve.server.logprobs import TextLogprobs, prompt_logprobs
from hiserve.server.reply_format import usage
from hiserve.server.request_options import RequestOptions
from hiserve.text.detokenizer import TokenBytes


class CompletionFormatter:
    """Words one text completion.

    Args:
        head: As ``reply_format.envelope`` makes it.
        options: What the reply shows.
        token_bytes: Of the model's tokens.
        prompts: Text of each prompt, for the echo; None for a prompt that was given as token ids.

    Attributes:
        chunk_head: What each chunk of a stream begins with.
    """

    def __init__(
        self, head: dict[str, Any], options: RequestOptions, token_bytes: TokenBytes, prompts: Sequence[str | None]
    ) -> None:
        self.chunk_head = {**head, "object": "text_completion"}
        self._options = options
        self._num_top = options.sampling.logprobs
        self._token_bytes = token_bytes
        self._prompts = prompts
        self._has_opening = options.has_echo or options.has_token_ids or options.num_prompt_top is not None
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
        is_shown = output_delta.text or output_delta.finish or self._options.has_token_ids or self._num_top is not None
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
        if self._options.has_token_ids:
            choice["token_ids"] = output_delta.tokens
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs[output_delta.choice].of_piece(output_delta)
        return choice

    def _open(self, generation: Generation) -> dict[str, Any]:
        """Returns what is shown of a choice's prompt, and gets ready to word its reply."""
        options, spell = self._options, self._token_bytes.bytes_of
        text, logprobs = self._echo(generation) if options.has_echo else ("", None)
        if self._num_top is not None:
            detokenizer = self._token_bytes.detokenizer(skip_special=options.sampling.skip_special_tokens)
            self._logprobs[generation.choice] = TextLogprobs(self._num_top, spell, detokenizer, len(text))
        opening: dict[str, Any] = {
            "index": generation.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if options.has_token_ids:
            opening |= {"prompt_token_ids": generation.prompt.tolist(), "token_ids": []}
        if options.num_prompt_top is not None:
            opening["prompt_logprobs"] = prompt_logprobs(generation, options.num_prompt_top, spell)
        return opening

    def _echo(self, generation: Generation) -> tuple[str, dict[str, list[Any]] | None]:
        """Returns the prompt's text and, if asked for, what is known of its tokens."""
        decoder, counter = (self._token_bytes.detokenizer(skip_special=False) for _ in range(2))
        decoded = decoder.push(generation.prompt.tolist()) + decoder.flush()
        given = self._prompts[generation.choice // self._options.sampling.n]
        text = decoded if given is None else given
        if self._num_top is None:
            return text, None
        # What the tokenizer put in front of a text is among the tokens, but not in the text.
        offset = len(text) - len(decoded)
        return text, TextLogprobs(self._num_top, self._token_bytes.bytes_of, counter, offset).of_prompt(generation)
