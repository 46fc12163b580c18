"""The JSON of replies: chat and text completions, whole and streamed."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from starlette.responses import Response

from hiserve.core.request import FinishReason
from hiserve.server.generation import Generation, Piece


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as clients see it.

    Attributes:
        name: What requests call it.
        root: What the server was started with.
        vocab_size: Token ids in prompts are below it.
        created: Unix time of the server's start.
        fingerprint: Changes when the same request may be answered differently.
    """

    name: str
    root: str
    vocab_size: int
    created: int
    fingerprint: str


class Shape:
    """Words one reply, in OpenAI's form.

    Args:
        model: The served model.
        is_chat: Chat completion; otherwise text completion.
        has_token_ids: Show prompt and generated token ids.

    Attributes:
        name: The reply's id.
    """

    def __init__(self, model: ServedModel, *, is_chat: bool, has_token_ids: bool) -> None:
        self.name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._is_chat = is_chat
        self._has_token_ids = has_token_ids
        self._whole_object = "chat.completion" if is_chat else "text_completion"
        self._chunk_object = "chat.completion.chunk" if is_chat else "text_completion"
        self._head = {
            "id": self.name,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Returns the reply that is not streamed."""
        text = generation.text
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self._is_chat else {"text": text}
        choice = self._choice(content, generation.tokens, generation.finish)
        prompt = {"prompt_token_ids": generation.prompt.tolist()} if self._has_token_ids else {}
        return {
            **self._head,
            "object": self._whole_object,
            **prompt,
            "choices": [choice],
            "usage": usage(generation),
        }

    def opening(self, generation: Generation) -> dict[str, Any] | None:
        """Returns what comes before the first piece, or None when nothing has to."""
        if not self._is_chat and not self._has_token_ids:
            return None
        content = {"delta": {"role": "assistant", "content": ""}} if self._is_chat else {"text": ""}
        prompt = {"prompt_token_ids": generation.prompt.tolist()} if self._has_token_ids else {}
        return {**self._chunk(self._choice(content, [], FinishReason.RUNNING)), **prompt}

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """Returns one piece of the stream, or None when it has nothing to show."""
        is_shown = piece.text or piece.finish or (self._has_token_ids and piece.tokens)
        if not is_shown:
            return None
        delta = {"content": piece.text} if piece.text else {}
        content = {"delta": delta} if self._is_chat else {"text": piece.text}
        return self._chunk(self._choice(content, piece.tokens, piece.finish))

    def closing(self, generation: Generation) -> dict[str, Any]:
        """Returns the chunk that carries the usage, after the last piece."""
        return {**self._chunk(), "usage": usage(generation)}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self._chunk_object, "choices": list(choices)}

    def _choice(self, content: dict[str, Any], tokens: list[int], finish: FinishReason) -> dict[str, Any]:
        ids = {"token_ids": tokens} if self._has_token_ids else {}
        return {"index": 0, **content, **ids, "logprobs": None, "finish_reason": finish.text}


def usage(generation: Generation) -> dict[str, Any]:
    """Returns the token counts of a request so far."""
    num_prompt, num_generated = len(generation.prompt), len(generation.tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached},
    }


def json_response(content: Any) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(content), media_type="application/json")
