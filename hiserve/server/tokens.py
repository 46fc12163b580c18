"""Texts and conversations to token ids and back, in vLLM's form: what a client counts with before it asks."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from hiserve.config.serving import MAX_INT32
from hiserve.errors import RequestError
from hiserve.server.auth import caller_of, namespace_of
from hiserve.server.body_fields import MAX_NAME_CHARS, Fields, check_model
from hiserve.server.body_reader import BodyReader
from hiserve.server.known_fields import CONVERSATION, check_fields
from hiserve.server.logprobs import token_text
from hiserve.server.reply_format import ServedModel, json_response
from hiserve.server.sse import cancel_on_disconnect
from hiserve.text.body_parser import parse_prompt
from hiserve.text.chat_request import parse_chat
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.prompt_encoder import PromptEncoder

# What is worked on at once: others wait meanwhile. Encoding so much takes a second or two of a thread, decoding 0.05 s.
MAX_CHARS = 4 * 2**20
MAX_TOKENS = 2**18
QUICK_TOKENS = 2**12
TOKENIZE = CONVERSATION | {"add_special_tokens", "cache_salt", "model", "prompt", "return_token_strs"}
DETOKENIZE = frozenset({"model", "tokens"})


class TokenRoutes:
    """Handlers that need the tokenizer and not the engine.

    Args:
        bodies: Reads what requests say.
        encoder: Encodes and decodes.
        words: Where large replies are worded.
        token_bytes: Of the model's tokens.
        model: The served model.
        tokenizer_info: What ``/tokenizer_info`` shows, as JSON.
        max_model_len: Longest prompt plus output, in tokens.
        is_strict: Refuse fields that are not known.
    """

    def __init__(
        self,
        bodies: BodyReader,
        encoder: PromptEncoder,
        words: FairThreads,
        token_bytes: TokenBytes,
        model: ServedModel,
        tokenizer_info: bytes,
        *,
        max_model_len: int,
        is_strict: bool,
    ) -> None:
        self._bodies = bodies
        self._encoder = encoder
        self._words = words
        self._token_bytes = token_bytes
        self._model = model
        self._tokenizer_info = tokenizer_info
        self._max_model_len = max_model_len
        self._is_strict = is_strict

    def router(self) -> APIRouter:
        """Returns the routes."""
        router = APIRouter()
        for prefix in ("", "/v1"):
            router.add_api_route(f"{prefix}/tokenize", self.tokenize, methods=["POST"])
            router.add_api_route(f"{prefix}/detokenize", self.detokenize, methods=["POST"])
        router.add_api_route("/tokenizer_info", self.tokenizer_info, methods=["GET"])
        return router

    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of ``prompt``, or those that a chat completion of ``messages`` would be given.

        They may be more than fit the context.
        """
        body = await self._read(request, TOKENIZE)
        fields, caller = Fields(body), caller_of(request).number
        adds_special, has_strings = fields.flag("add_special_tokens", True), fields.flag("return_token_strs")
        text = fields.text("prompt", most=MAX_CHARS)
        if fields.has("messages") == (text is not None):
            raise RequestError("give either prompt or messages.", param="prompt")
        if text is None:
            namespace = namespace_of(request, fields.text("cache_salt", most=MAX_NAME_CHARS))
            chat = parse_chat(body)
            if chat.num_chars > MAX_CHARS:
                raise fields.wrong("messages", f"at most {MAX_CHARS} characters long")
            encoding = self._encoder.encode_chat(chat, namespace=namespace, max_tokens=MAX_INT32, caller=caller)
        else:
            encoding = self._encoder.encode_text(
                text, max_tokens=MAX_INT32, add_special_tokens=adds_special, caller=caller
            )
        ids = await cancel_on_disconnect(request.receive, encoding)

        def worded() -> Response:
            tokens = ids.tolist()
            strings = [token_text(self._token_bytes.bytes_of(token)) for token in tokens] if has_strings else None
            reply = {
                "count": len(tokens),
                "max_model_len": self._max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
            return json_response(reply)

        return worded() if len(ids) <= QUICK_TOKENS else await self._words.do(worded, caller)

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of ``tokens``, special tokens as they are spelled."""
        body = await self._read(request, DETOKENIZE)
        fields, tokens = Fields(body), body.get("tokens")
        if isinstance(tokens, list) and not tokens:
            return json_response({"prompt": ""})
        if isinstance(tokens, list | np.ndarray) and len(tokens) > MAX_TOKENS:
            raise fields.wrong("tokens", f"a list of at most {MAX_TOKENS} token ids")
        ids = parse_prompt(tokens, vocab_size=self._model.vocab_size, param="tokens")
        if isinstance(ids, str):
            raise RequestError("tokens must be a list of token ids.", param="tokens")

        def worded() -> Response:
            return json_response({"prompt": self._encoder.detokenize(ids.tolist())})

        return worded() if len(ids) <= QUICK_TOKENS else await self._words.do(worded, caller_of(request).number)

    async def tokenizer_info(self) -> Response:
        """Shows the tokenizer's configuration."""
        return Response(self._tokenizer_info, media_type="application/json")

    async def _read(self, request: Request, known: frozenset[str]) -> dict[str, Any]:
        body = await self._bodies.read(request)
        check_model(body, self._model.name)
        check_fields(body, known, is_strict=self._is_strict)
        return body
