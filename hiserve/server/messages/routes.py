"""Anthropic's endpoints: messages, and the number of tokens in a prompt."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from hiserve.errors import ContextLengthError, RequestError
from hiserve.server.conversations import ChatRequest, begin_reply, count_tokens
from hiserve.server.http.streaming import answer
from hiserve.server.messages.format import ERRORS, PING, MessageWriter, error_event
from hiserve.server.messages.request import MessagesPrompt, read_messages
from hiserve.server.messages.types import AssistantMessage, CountedTokens, MessagesFields, MessagesOptions
from hiserve.server.reply.format import json_response, warned
from hiserve.server.request.body import Body
from hiserve.server.request.grammar_fields import one_of
from hiserve.server.request.resumption import resume, resumed_tokens
from hiserve.server.routes import Endpoint, FrontEnd, context_of
from hiserve.text.body.json import decode
from hiserve.text.body.retention import seconds_of

MESSAGES = Body("MessagesRequest", (MessagesOptions, MessagesFields))
COUNT = Body("CountTokensRequest", (MessagesFields,))


class MessagesRoutes:
    """Handlers of ``/v1/messages``.

    Args:
        front: Shared with other handlers.
        keeps_volatile: ``--keep-volatile``.
    """

    def __init__(self, front: FrontEnd, *, keeps_volatile: bool) -> None:
        self._front = front
        self._keeps_volatile = keeps_volatile

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        post = partial(Endpoint, error_form=ERRORS)
        return [
            post("/v1/messages", self.create, "POST", body=MESSAGES, reply=AssistantMessage, streams=True),
            post("/v1/messages/count_tokens", self.count, "POST", body=COUNT, reply=CountedTokens),
        ]

    async def create(self, request: Request) -> Response:
        """Answers a conversation in Anthropic's form."""
        arrived, front = time.monotonic(), self._front
        body = await front.bodies.read(request, MESSAGES)
        options, fields = decode(body, MessagesOptions), decode(body, MessagesFields)
        sampling, read = options.sampling(front.model), self._read(fields)
        resumed = resumed_tokens(options.resume_token_ids, front.model, is_stream=bool(options.stream))
        engine = front.handle.require()
        context = context_of(request, fields.cache_salt, options.priority, options.rid)
        constraint = one_of([*options.constraints(), *fields.constraints])
        chat_request = ChatRequest(
            read.chat,
            sampling,
            options.limits,
            context,
            constraint,
            thinking=read.thinking,
            retain_s=seconds_of(fields.cache_control),
            tool_fields=read.tool_fields,
        )
        writer = MessageWriter(
            front.model,
            front.seals.seal,
            shows_thoughts=fields.shows_thoughts,
            shows_tokens=bool(options.return_token_ids),
        )
        try:
            choices, warning = await begin_reply(front, request, engine, chat_request, writer.name, arrived)
        except ContextLengthError:
            raise await self._too_long(request, chat_request, fields.cache_salt, engine.max_model_len - 1) from None
        for _, shown in await resume(resumed, choices, front.model, engine.max_model_len):
            writer.resume(shown)
        response = await answer(
            request,
            engine,
            choices,
            front.format_threads,
            whole=partial(writer.whole, choices),
            events=partial(writer.events, choices=choices) if options.stream else None,
            failure=partial(error_event, request.state.request_id),
            ping=PING,
        )
        return warned(response, warning)

    async def count(self, request: Request) -> Response:
        """Returns the number of tokens in the prompt of a message."""
        front = self._front
        fields = decode(await front.bodies.read(request, COUNT), MessagesFields)
        read = self._read(fields)
        number = await count_tokens(front, request, read.chat, read.thinking, "messages", fields.cache_salt)
        return json_response(CountedTokens(number))

    def _read(self, fields: MessagesFields) -> MessagesPrompt:
        front = self._front
        read = read_messages(fields, front.seals.open, keeps_volatile=self._keeps_volatile)
        ignored, thinking = read.ignored, read.thinking
        ignored["effort"] += bool(thinking.effort) and not front.abilities.template.effort_switch
        for name, number in ignored.items():
            front.metrics.ignored[name].inc(number)
        return read

    async def _too_long(
        self, request: Request, chat_request: ChatRequest, cache_salt: str | None, most: int
    ) -> ContextLengthError:
        """Returns the error at which clients compact a conversation; they read the numbers.

        A conversation that is too long to be counted has at least one token more than fit. ``most`` leave room for a reply.
        """
        number = most + 1
        with suppress(RequestError):
            counted = await count_tokens(
                self._front, request, chat_request.chat, chat_request.thinking, "messages", cache_salt
            )
            number = max(number, counted)
        return ContextLengthError(f"prompt is too long: {number} tokens > {most} maximum", param="messages")
