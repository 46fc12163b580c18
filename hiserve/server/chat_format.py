"""The JSON of chat completions, whole and streamed."""

from __future__ import annotations

from typing import Any

from hiserve.server.choices import Choices
from hiserve.server.generation import Generation, OutputDelta, nothing
from hiserve.server.logprobs import Spell, chat_logprobs, prompt_logprobs
from hiserve.server.reply_format import usage
from hiserve.server.request_options import RequestOptions


class ChatFormatter:
    """Words one chat completion.

    Args:
        head: As ``reply_format.envelope`` makes it.
        options: What the reply shows.
        spell: Spells a token.

    Attributes:
        chunk_head: What each chunk of a stream begins with.
    """

    def __init__(self, head: dict[str, Any], options: RequestOptions, spell: Spell) -> None:
        self._whole_head = {**head, "object": "chat.completion"}
        self.chunk_head = {**head, "object": "chat.completion.chunk"}
        self._has_token_ids = options.has_token_ids
        self._num_top = options.sampling.logprobs
        self._num_prompt_top = options.num_prompt_top
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
