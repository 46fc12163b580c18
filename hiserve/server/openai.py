"""OpenAI's endpoints: chat completions, text completions, models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from hiserve.core.plan import Int32Array
from hiserve.errors import NotFoundError
from hiserve.server.answer import answer
from hiserve.server.auth import caller_of, namespace_of, tag_of
from hiserve.server.body_fields import check_model
from hiserve.server.body_reader import BodyReader
from hiserve.server.chat_format import ChatFormatter
from hiserve.server.choices import Choices, each_choice
from hiserve.server.completion_format import CompletionFormatter
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.generation import Generation, RequestContext
from hiserve.server.logprobs import check_prompt_scores
from hiserve.server.metrics import Metrics, RequestTimer
from hiserve.server.prompt_fields import parse_prompts
from hiserve.server.reply_format import ServedModel, envelope, json_response
from hiserve.server.request_options import RequestOptions, fit_context, parse_options
from hiserve.server.sse import cancel_on_disconnect
from hiserve.text.chat_request import parse_chat
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.output import TextOutput
from hiserve.text.prompt_encoder import PromptEncoder, truncated

WARNING_HEADER = "x-hiserve-warning"
HIDDEN_TOOLS = "the chat template of this model does not show tools: the model cannot see the tools of this request"


class OpenAIRoutes:
    """Handlers of ``/v1``.

    Args:
        handle: Where the engine is.
        bodies: Reads what requests say.
        encoder: Encodes prompts and remembers replies.
        words: Where large replies are worded.
        token_bytes: Of the model's tokens.
        metrics: Where requests are counted.
        model: The served model.
        is_strict: Refuse fields that are not known.
    """

    def __init__(
        self,
        handle: EngineHandle,
        bodies: BodyReader,
        encoder: PromptEncoder,
        words: FairThreads,
        token_bytes: TokenBytes,
        metrics: Metrics,
        model: ServedModel,
        *,
        is_strict: bool = False,
    ) -> None:
        self._handle = handle
        self._bodies = bodies
        self._encoder = encoder
        self._words = words
        self._token_bytes = token_bytes
        self._metrics = metrics
        self._model = model
        self._is_strict = is_strict

    def router(self) -> APIRouter:
        """Returns the routes."""
        router = APIRouter(prefix="/v1")
        router.add_api_route("/chat/completions", self.chat, methods=["POST"])
        router.add_api_route("/completions", self.completions, methods=["POST"])
        router.add_api_route("/models", self.models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.one_model, methods=["GET"])
        return router

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        arrived = time.monotonic()
        body, options = await self._read(request, is_chat=True)
        chat = parse_chat(body)
        engine = self._handle.require()
        context = _terms(request, options)
        encoding = self._encoder.encode_chat(
            chat,
            namespace=context.namespace,
            max_tokens=engine.max_model_len,
            truncate=options.truncate_prompt_tokens,
            caller=context.caller,
        )
        prompt = await cancel_on_disconnect(request.receive, encoding)
        head = envelope(self._model, "chatcmpl")
        choices = self._choices(
            head["id"],
            [prompt],
            options,
            max_model_len=engine.max_model_len,
            arrived=arrived,
            remember=partial(self._encoder.remember, context.namespace, chat),
        )
        formatter = ChatFormatter(head, options, self._token_bytes.bytes_of)
        response = await answer(request, engine, choices, formatter, options, context, self._words)
        if self._encoder.hides_tools(chat):
            self._metrics.hidden_tools.inc()
            response.headers[WARNING_HEADER] = HIDDEN_TOOLS
        return response

    async def completions(self, request: Request) -> Response:
        """Continues texts or lists of token ids."""
        arrived = time.monotonic()
        body, options = await self._read(request, is_chat=False)
        given = parse_prompts(body, vocab_size=self._model.vocab_size, num_per_prompt=options.sampling.n)
        engine = self._handle.require()
        prompts = await cancel_on_disconnect(
            request.receive, self._encode(given, options, engine.max_model_len, caller_of(request).number)
        )
        head = envelope(self._model, "cmpl")
        choices = self._choices(
            head["id"], prompts, options, max_model_len=engine.max_model_len, arrived=arrived, remember=None
        )
        is_whole = options.truncate_prompt_tokens is None
        texts = [prompt if isinstance(prompt, str) and is_whole else None for prompt in given]
        formatter = CompletionFormatter(head, options, self._token_bytes, texts)
        return await answer(request, engine, choices, formatter, options, _terms(request, options), self._words)

    async def models(self) -> Response:
        """Lists the one served model."""
        return json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> Response:
        """Describes the served model.

        Raises:
            NotFoundError: ``name`` is another one.
        """
        if name != self._model.name:
            raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {self._model.name!r}.")
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        engine = self._handle.engine
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "hiserve",
            "root": self._model.root,
            "parent": None,
            "max_model_len": engine.max_model_len if engine else None,
        }

    async def _read(self, request: Request, *, is_chat: bool) -> tuple[dict[str, Any], RequestOptions]:
        body = await self._bodies.read(request)
        check_model(body, self._model.name)
        options = parse_options(
            body,
            self._model.defaults,
            vocab_size=self._model.vocab_size,
            spec_steps=self._model.spec_steps,
            is_chat=is_chat,
            is_strict=self._is_strict,
        )
        return body, options

    async def _encode(
        self, given: Sequence[str | Int32Array], options: RequestOptions, max_model_len: int, caller: int
    ) -> list[Int32Array]:
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                encoding = self._encoder.encode_text(
                    prompt,
                    max_tokens=max_model_len,
                    add_special_tokens=options.add_special_tokens,
                    truncate=options.truncate_prompt_tokens,
                    caller=caller,
                )
                prompts.append(await encoding)
                await asyncio.sleep(0)  # other requests come in between
            else:
                prompts.append(truncated(prompt, options.truncate_prompt_tokens, max_model_len))
        return prompts

    def _choices(
        self,
        name: str,
        prompts: Sequence[Int32Array],
        options: RequestOptions,
        *,
        max_model_len: int,
        arrived: float,
        remember: Callable[[str, list[int]], None] | None,
    ) -> Choices:
        """Makes the generations of a reply; ``remember`` is for a chat's."""
        generations: list[Generation] = []
        num_top = options.sampling.prompt_logprobs
        if num_top is not None:
            num_shown = 1 if remember else options.sampling.n  # a chat shows them once
            param = "logprobs" if options.num_prompt_top is None else "prompt_logprobs"
            check_prompt_scores(num_shown * sum(map(len, prompts)) * (1 + num_top), param)
        for prompt in prompts:
            sampling = fit_context(len(prompt), options, max_model_len, is_chat=remember is not None)
            scorer: Generation | None = None
            for seat, of_choice in enumerate(each_choice(sampling)):
                generation = Generation(
                    name,
                    prompt,
                    of_choice,
                    output=TextOutput(self._token_bytes, of_choice),
                    timer=RequestTimer(self._metrics, num_prompt=len(prompt), arrived=arrived),
                    choice=len(generations),
                    seat=seat,
                    scorer=scorer,
                    keeps_tokens=options.keeps_tokens,
                    remember=remember,
                )
                scorer = scorer or generation
                generations.append(generation)
        return Choices(generations, options.sampling.n)


def _terms(request: Request, options: RequestOptions) -> RequestContext:
    return RequestContext(
        namespace_of(request, options.salt),
        options.priority,
        caller_of(request).number,
        tag_of(request, options.rid),
    )
