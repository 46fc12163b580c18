"""OpenAI's endpoints: chat completions, text completions, models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import NotFoundError
from hiserve.grammar.tools import CustomTools, ToolField
from hiserve.scheduler.client import EngineClient
from hiserve.server.conversations import ChatRequest, begin_reply
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import answer, cancel_on_disconnect
from hiserve.server.openai.format import ChatFormatter, CompletionFormatter, ReplyFormatter, events
from hiserve.server.openai.types import (
    Card,
    ChatCompletion,
    ChatOptions,
    Completion,
    CompletionRequest,
    ModelList,
    OpenAIFields,
)
from hiserve.server.reply.choices import Choices, generations
from hiserve.server.reply.format import envelope, json_response, named_in, warned
from hiserve.server.reply.generation import Generation, OutputDelta, RequestContext
from hiserve.server.reply.logprobs import check_prompt_scores
from hiserve.server.request.body import Body
from hiserve.server.request.grammar_fields import NOT_HELD, constrain
from hiserve.server.request.resumption import Resumed, resume, resumed_tokens
from hiserve.server.request.sampling_fields import fit_context
from hiserve.server.routes import Endpoint, FrontEnd, context_of
from hiserve.text.body.chat import ChatFields, parse_chat
from hiserve.text.body.json import decode
from hiserve.text.body.retention import retention_s
from hiserve.text.prompt.encoder import truncated

CHAT = Body("ChatCompletionRequest", (ChatOptions, ChatFields))
COMPLETION = Body("CompletionRequest", (CompletionRequest,))


class OpenAIRoutes:
    """Handlers of ``/v1``.

    Args:
        front: Shared with other handlers.
    """

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._model = front.model

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/v1/chat/completions", self.chat, "POST", body=CHAT, reply=ChatCompletion, streams=True),
            Endpoint("/v1/completions", self.completions, "POST", body=COMPLETION, reply=Completion, streams=True),
            Endpoint("/v1/models", self.models, "GET", reply=ModelList),
            Endpoint("/v1/models/{name:path}", self.one_model, "GET", reply=Card),
        ]

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        arrived, front = time.monotonic(), self._front
        body = await front.bodies.read(request, CHAT)
        fields = decode(body, ChatOptions)
        custom = CustomTools()
        sampling, chat = fields.sampling(self._model), parse_chat(body, custom.pattern)
        resumed = self._resumed(fields, sampling.n)
        front.metrics.ignored["tool_grammar"].inc(len(custom.not_held))
        engine = front.handle.require()
        chat_request = ChatRequest(
            chat,
            sampling,
            fields.limits,
            context_of(request, fields.cache_salt, fields.priority, fields.rid, fields.prompt_cache_key),
            fields.constraint,
            fields.truncate_prompt_tokens,
            fields.thoughts,
            retention_s(fields.prompt_cache_retention, fields.prompt_cache_options),
            _tool_fields(body.get("tools") or ()) if custom.names else (),
            tuple(custom.not_held.values()),
        )
        head = envelope(self._model, "chatcmpl")
        choices, warning = await begin_reply(front, request, engine, chat_request, head["id"], arrived)
        formatter = ChatFormatter(head, fields, front.token_bytes.bytes_of, custom.names)
        warning = named_in(warning, NOT_HELD, custom.not_held)
        await self._resume(resumed, choices, formatter, engine.max_model_len)
        return warned(await self._answer(request, engine, fields, choices, formatter), warning)

    async def completions(self, request: Request) -> Response:
        """Continues texts or lists of token ids."""
        arrived, front = time.monotonic(), self._front
        fields = decode(await front.bodies.read(request, COMPLETION), CompletionRequest)
        sampling, given = fields.sampling(self._model), fields.prompts(self._model.vocab_size)
        resumed = self._resumed(fields, len(given) * sampling.n)
        engine = front.handle.require()
        context = context_of(request, fields.cache_salt, fields.priority, fields.rid, fields.prompt_cache_key)
        encoding = self._encode(given, fields, engine.max_model_len, context.caller)
        prompts = await cancel_on_disconnect(request.receive, encoding)
        fit_context(sampling, fields.limits, max(map(len, prompts)), engine.max_model_len)  # before a grammar is tried
        sampling, warning = await constrain(
            front.vetting, request, sampling, fields.constraint, len(given) * sampling.n
        )
        head = envelope(self._model, "cmpl")
        choices = self._choices(request, head["id"], prompts, fields, sampling, context, engine.max_model_len, arrived)
        is_whole = fields.truncate_prompt_tokens is None
        texts = [prompt if isinstance(prompt, str) and is_whole else None for prompt in given]
        formatter = CompletionFormatter(head, fields, front.token_bytes, texts)
        await self._resume(resumed, choices, formatter, engine.max_model_len)
        return warned(await self._answer(request, engine, fields, choices, formatter), warning)

    async def models(self, _: Request) -> Response:
        """Lists the one served model."""
        return json_response(ModelList("list", [self._card()]))

    async def one_model(self, request: Request) -> Response:
        """Describes the served model.

        Raises:
            NotFoundError: The path names another one.
        """
        name = request.path_params["name"]
        if name != self._model.name:
            raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {self._model.name!r}.")
        return json_response(self._card())

    def _card(self) -> Card:
        engine, model = self._front.handle.engine, self._model
        return Card(
            id=model.name,
            object="model",
            created=model.created,
            owned_by="hiserve",
            root=model.root,
            parent=None,
            max_model_len=engine.max_model_len if engine else None,
        )

    async def _encode(
        self, given: Sequence[str | Int32Array], fields: CompletionRequest, max_model_len: int, caller: int
    ) -> list[Int32Array]:
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                encoding = self._front.encoder.encode_text(
                    prompt,
                    max_tokens=max_model_len,
                    add_special_tokens=fields.add_special_tokens is not False,
                    truncate=fields.truncate_prompt_tokens,
                    caller=caller,
                )
                prompts.append(await encoding)
                await asyncio.sleep(0)  # other requests come in between
            else:
                prompts.append(truncated(prompt, fields.truncate_prompt_tokens, max_model_len))
        return prompts

    def _resumed(self, fields: OpenAIFields, num_choices: int) -> Resumed:
        return resumed_tokens(
            fields.resume_token_ids, self._model, is_stream=bool(fields.stream), num_choices=num_choices
        )

    async def _resume(self, resumed: Resumed, choices: Choices, formatter: ReplyFormatter, max_model_len: int) -> None:
        """Begins a stream after the tokens that its client has, if it has any."""
        for generation, shown in await resume(resumed, choices, self._model, max_model_len):
            formatter.resume(generation, shown)

    def _choices(
        self,
        request: Request,
        name: str,
        prompts: Sequence[Int32Array],
        fields: CompletionRequest,
        sampling: SamplingParams,
        context: RequestContext,
        max_model_len: int,
        arrived: float,
    ) -> Choices:
        num_top = sampling.prompt_logprobs
        if num_top is not None:
            param = "logprobs" if fields.prompt_logprobs is None else "prompt_logprobs"
            check_prompt_scores(sampling.n * sum(map(len, prompts)) * (1 + num_top), param)
        made, retain_s = list[Generation](), retention_s(fields.prompt_cache_retention, fields.prompt_cache_options)
        for prompt in prompts:
            retain = ((len(prompt), retain_s),) if retain_s else ()
            made += generations(
                name,
                prompt,
                fit_context(sampling, fields.limits, len(prompt), max_model_len),
                context._replace(retain=retain),
                token_bytes=self._front.token_bytes,
                metrics=self._front.metrics,
                arrived=arrived,
                draw_seed=self._front.draw_seed(request),
                first=len(made),
                keeps_tokens=fields.limit != 0,
            )
        return Choices(made, sampling.n)

    async def _answer(
        self,
        request: Request,
        engine: EngineClient,
        fields: OpenAIFields,
        choices: Choices,
        formatter: ReplyFormatter,
    ) -> Response:
        threads = self._front.format_threads

        def stream(deltas: AsyncGenerator[OutputDelta, None]) -> AsyncGenerator[bytes, None]:
            return events(deltas, choices, formatter, fields, partial(threads.do, caller=caller_of(request).number))

        whole = partial(formatter.whole, choices)
        return await answer(request, engine, choices, threads, whole=whole, events=stream if fields.stream else None)


def _tool_fields(tools: Sequence[dict[str, Any]]) -> list[ToolField]:
    """Returns the fields of tools that are functions and custom ones."""
    kinds = {"function": "parameters", "custom": "format"}
    return [ToolField(f"tools[{i}].{tool['type']}", kinds[tool["type"]]) for i, tool in enumerate(tools)]
