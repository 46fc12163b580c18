"""Endpoints that convert texts and conversations to token ids and back, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hiserve.config.serving import MAX_INT32
from hiserve.errors import RequestError
from hiserve.grammar.tools import CustomTools
from hiserve.server.http.auth import caller_of, namespace_of
from hiserve.server.http.streaming import cancel_on_disconnect
from hiserve.server.reply.format import json_response
from hiserve.server.reply.logprobs import token_text
from hiserve.server.request.body import MAX_CHARS, Body
from hiserve.server.request.sampling_fields import Name, TokenId
from hiserve.server.routes import Endpoint, FrontEnd
from hiserve.text.abilities import Thinking
from hiserve.text.body.chat import ChatFields, parse_chat
from hiserve.text.body.json import check_text, decode, union
from hiserve.text.body.parser import parse_prompt

# Of one request; decoding this number takes a thread 0.05 s, in which others wait.
MAX_TOKENS = 2**18
QUICK_TOKENS = 2**12


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text to encode; or a conversation, whose fields are ``ChatFields``."""

    prompt: Annotated[str, Meta(max_length=MAX_CHARS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    cache_salt: Name | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to decode."""

    tokens: Annotated[Any, union("a list of token ids", Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)])]
    model: str | None = None


class Tokenized(msgspec.Struct):
    """Reply of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Reply of ``/detokenize``."""

    prompt: str


TOKENIZE = Body("TokenizeRequest", (TokenizeRequest, ChatFields), either=("prompt", "messages"))
DETOKENIZE = Body("DetokenizeRequest", (DetokenizeRequest,))


class TokenRoutes:
    """Handlers that need the tokenizer and not the engine.

    Args:
        front: Shared with other handlers.
        tokenizer_info: Reply of ``/tokenizer_info``, JSON.
        max_model_len: Longest prompt plus output, in tokens.
    """

    def __init__(self, front: FrontEnd, tokenizer_info: bytes, *, max_model_len: int) -> None:
        self._front = front
        self._tokenizer_info = tokenizer_info
        self._max_model_len = max_model_len

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/tokenize", self.tokenize, "POST", body=TOKENIZE, reply=Tokenized),
            Endpoint("/v1/tokenize", self.tokenize, "POST", body=TOKENIZE, reply=Tokenized),
            Endpoint("/detokenize", self.detokenize, "POST", body=DETOKENIZE, reply=Detokenized),
            Endpoint("/v1/detokenize", self.detokenize, "POST", body=DETOKENIZE, reply=Detokenized),
            Endpoint("/tokenizer_info", self.tokenizer_info, "GET", reply=dict[str, Any]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of ``prompt``, or the prompt's ids of a chat completion of ``messages``.

        They may exceed the context.
        """
        body, caller = await self._front.bodies.read(request, TOKENIZE), caller_of(request).number
        fields, encoder = decode(body, TokenizeRequest), self._front.encoder
        has_messages = body.get("messages") is not None
        if has_messages == (fields.prompt is not None):
            raise RequestError("give either prompt or messages.", param="prompt")
        if fields.prompt is None:
            chat = self._front.abilities.prepared(parse_chat(body, CustomTools().pattern), Thinking())
            namespace = namespace_of(request, fields.cache_salt)
            if chat.num_chars > MAX_CHARS:
                raise RequestError(f"messages must be at most {MAX_CHARS} characters long.", param="messages")
            encoding = encoder.encode_chat(chat, namespace=namespace, max_tokens=MAX_INT32, caller=caller)
        else:
            check_text(fields.prompt, "prompt")
            adds_special = fields.add_special_tokens is not False
            encoding = encoder.encode_text(
                fields.prompt, max_tokens=MAX_INT32, add_special_tokens=adds_special, caller=caller
            )
        ids = await cancel_on_disconnect(request.receive, encoding)

        def formatted() -> Response:
            tokens = ids.tolist()
            strings = (
                [token_text(self._front.token_bytes.bytes_of(token)) for token in tokens]
                if fields.return_token_strs
                else None
            )
            return json_response(Tokenized(len(tokens), self._max_model_len, tokens, strings))

        return formatted() if len(ids) <= QUICK_TOKENS else await self._front.format_threads.do(formatted, caller)

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of ``tokens``, special tokens as they are spelled."""
        tokens = decode(await self._front.bodies.read(request, DETOKENIZE), DetokenizeRequest).tokens
        if isinstance(tokens, list) and not tokens:
            return json_response(Detokenized(""))
        if isinstance(tokens, list | np.ndarray) and len(tokens) > MAX_TOKENS:
            raise RequestError(f"tokens must be a list of at most {MAX_TOKENS} token ids.", param="tokens")
        ids = parse_prompt(tokens, vocab_size=self._front.model.vocab_size, param="tokens")
        if isinstance(ids, str):
            raise RequestError("tokens must be a list of token ids.", param="tokens")

        def formatted() -> Response:
            return json_response(Detokenized(self._front.encoder.detokenize(ids.tolist())))

        return (
            formatted()
            if len(ids) <= QUICK_TOKENS
            else await self._front.format_threads.do(formatted, caller_of(request).number)
        )

    async def tokenizer_info(self, _: Request) -> Response:
        """Shows the tokenizer's configuration."""
        return Response(self._tokenizer_info, media_type="application/json")
