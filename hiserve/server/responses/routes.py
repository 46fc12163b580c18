"""Endpoints that make, continue, show and delete OpenAI's responses."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve.core.request import SamplingParams
from hiserve.errors import ContextLengthError, RequestError, UnavailableError
from hiserve.scheduler.client import EngineClient
from hiserve.server.conversations import ChatRequest, begin_reply, count_tokens, without_oldest
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import answer
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import json_response, named_in, warned
from hiserve.server.reply.logprobs import chat_logprobs
from hiserve.server.request.body import Body
from hiserve.server.request.grammar_fields import NOT_HELD
from hiserve.server.request.resumption import resume, resumed_tokens
from hiserve.server.responses.format import ResponseWriter
from hiserve.server.responses.items import (
    Deleted,
    InputTokens,
    ItemList,
    ResponseObject,
    all_items,
    own_items,
    references,
    resolved,
    with_id,
)
from hiserve.server.responses.request import Tools, conversation_of, read_tools
from hiserve.server.responses.store import MAX_CHAIN_ITEMS, ResponseStore, StoredResponse, missing, missing_item
from hiserve.server.responses.types import InputFields, Item, Reasoning, ResponseOptions, TextOptions
from hiserve.server.routes import Endpoint, FrontEnd, context_of
from hiserve.text.body.json import check_json, check_text, decode
from hiserve.text.body.retention import retention_s
from hiserve.text.helpers.fair_threads import FairThreads

RESPONSES = Body("ResponsesRequest", (ResponseOptions, InputFields))
INPUT_TOKENS = Body("InputTokensRequest", (InputFields,))
DEFAULT_PAGE, MAX_PAGE = 20, 100
PAGE: dict[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
ECHOED = ("tools", "tool_choice", "metadata", "reasoning")  # in the response
T = TypeVar("T")

logger = logging.getLogger(__name__)


class ResponseRoutes:
    """Handlers of ``/v1/responses``.

    Args:
        front: Shared with other handlers.
        store: Keeps responses, and is closed by ``close``; None keeps none.
    """

    def __init__(self, front: FrontEnd, store: ResponseStore | None) -> None:
        self._front = front
        self._model = front.model
        self._store = store
        self._threads = FairThreads(1, "hiserve-responses")  # for the store

    async def close(self) -> None:
        """Closes the store after its last use."""
        if self._store is not None:
            await self._threads.do(self._store.close, 0)
        self._threads.close()

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        one = "/v1/responses/{response_id}"
        return [
            Endpoint("/v1/responses", self.create, "POST", body=RESPONSES, reply=ResponseObject, streams=True),
            Endpoint("/v1/responses/input_tokens", self.count, "POST", body=INPUT_TOKENS, reply=InputTokens),
            Endpoint(one, self.get, "GET", reply=ResponseObject),
            Endpoint(one, self.delete, "DELETE", reply=Deleted),
            Endpoint(f"{one}/input_items", self.input_items, "GET", reply=ItemList, query=PAGE),
        ]

    async def create(self, request: Request) -> Response:
        """Answers items, or continues an earlier response."""
        arrived, front = time.monotonic(), self._front
        body = await front.bodies.read(request, RESPONSES)
        options, fields = decode(body, ResponseOptions), await self._fields(request, body)
        for name in ECHOED:
            check_json(body.get(name), name)
        sampling, tools = options.sampling(self._model), self._tools(fields)
        resumed = resumed_tokens(options.resume_token_ids, self._model, is_stream=bool(options.stream))
        chat = conversation_of(fields, await self._earlier(request, fields), tools, self._unseal)
        engine = front.handle.require()
        context = context_of(request, options.cache_salt, options.priority, options.rid, options.prompt_cache_key)
        chat_request = ChatRequest(
            chat,
            sampling,
            options.limits,
            context,
            fields.constraint,
            thinking=fields.thinking,
            retain_s=retention_s(options.prompt_cache_retention, options.prompt_cache_options),
            tool_fields=tools.fields,
            shown=tuple(tools.custom.not_held.values()),
        )
        response = self._response(options, fields, sampling, body.get("tools"))
        choices, warning = await self._begin(request, engine, chat_request, response, arrived)
        seal = front.seals.seal if options.seals else None
        score = None
        if options.num_top is not None:
            score = partial(chat_logprobs, num_top=options.num_top, spell=front.token_bytes.bytes_of)
        shows_tokens = bool(options.return_token_ids)
        writer = ResponseWriter(response, self._model.page_size, tools.names, seal, score, shows_tokens=shows_tokens)
        for _, shown in await resume(resumed, choices, self._model, engine.max_model_len):
            writer.resume(shown)
        keep = partial(self._keep, request, fields.items, response)

        def failure(_: int, message: str, code: str, __: str | None) -> bytes:
            return writer.failed(code, message)

        reply = await answer(
            request,
            engine,
            choices,
            front.format_threads,
            whole=partial(writer.whole, choices),
            events=partial(writer.events, choices=choices, keep=keep) if options.stream else None,
            failure=failure,
        )
        if not options.stream:
            await keep()
        warning = named_in(warning, "this server runs no tools; these were left out", tools.hosted)
        warning = named_in(warning, NOT_HELD, tools.custom.not_held)
        return warned(reply, warning)

    async def count(self, request: Request) -> Response:
        """Counts the tokens of a prompt."""
        body = await self._front.bodies.read(request, INPUT_TOKENS)
        fields = await self._fields(request, body)
        check_json(body.get("tools"), "tools")
        chat = conversation_of(fields, await self._earlier(request, fields), self._tools(fields), self._unseal)
        return json_response(InputTokens(await count_tokens(self._front, request, chat, fields.thinking, "input")))

    async def get(self, request: Request) -> Response:
        """Returns a stored response; OpenAI, too, streams again only those that were made in the background."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise RequestError(
                "a stored response is not streamed again; leave stream out to get it whole.", param="stream"
            )
        stored = await self._stored(request, lambda store, caller, name: store.get(caller, name))
        return Response(stored.reply, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response."""
        await self._stored(request, lambda store, caller, name: store.delete(caller, name))
        return json_response(Deleted(request.path_params["response_id"]))

    async def input_items(self, request: Request) -> Response:
        """Lists the input items of a stored response, those of earlier responses included."""

        def work(store: ResponseStore, caller: bytes, name: str) -> list[StoredResponse]:
            store.get(caller, name)
            return store.chain(caller, name)

        *_, last = chain = await self._stored(request, work)
        items = [*all_items(chain[:-1]), *own_items(last)]
        return json_response(page_of(items, request.query_params))

    def _tools(self, fields: InputFields) -> Tools:
        """Returns the tools of a request, and counts ignored fields."""
        tools = read_tools(fields.tools or ())
        ignored, has_effort = self._front.metrics.ignored, bool(self._front.abilities.template.effort_switch)
        ignored["hosted_tool"].inc(len(tools.hosted))
        ignored["tool_grammar"].inc(len(tools.custom.not_held))
        ignored["effort"].inc(bool(fields.thinking.effort) and not has_effort)
        return tools

    def _unseal(self, seal: str) -> str | None:
        thought = self._front.seals.open(seal)
        if thought is None:
            self._front.metrics.ignored["thought"].inc()
        return thought

    def _response(
        self, options: ResponseOptions, fields: InputFields, sampling: SamplingParams, tools: Any
    ) -> ResponseObject:
        """Returns the response before its first token; ``tools`` are as the client gave them."""
        return ResponseObject(
            id=f"resp_{secrets.token_hex(16)}",
            created_at=int(time.time()),
            model=self._model.name,
            instructions=fields.instructions,
            max_output_tokens=options.max_output_tokens,
            max_tool_calls=options.max_tool_calls,
            metadata=options.metadata or {},
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=options.prompt_cache_key,
            reasoning=fields.reasoning or Reasoning(),
            store=options.store is not False and self._store is not None,
            temperature=sampling.temperature,
            text=TextOptions(format=fields.format),
            tool_choice=fields.tool_choice or "auto",
            tools=msgspec.Raw(msgspec.json.encode(tools or [])),
            top_logprobs=options.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=fields.truncation or "disabled",
            user=options.user,
        )

    async def _begin(
        self,
        request: Request,
        engine: EngineClient,
        chat_request: ChatRequest,
        response: ResponseObject,
        arrived: float,
    ) -> tuple[Choices, str]:
        """Begins the reply; with ``truncation`` ``auto``, without the oldest turns as long as they do not fit."""
        while True:
            try:
                return await begin_reply(self._front, request, engine, chat_request, response.id, arrived)
            except ContextLengthError:
                shorter = without_oldest(chat_request.chat) if response.truncation == "auto" else None
                if shorter is None:
                    raise
                chat_request = chat_request._replace(chat=shorter)

    async def _stored(self, request: Request, work: Callable[[ResponseStore, bytes, str], T]) -> T:
        """Does something with the response that the path names.

        Raises:
            NotFoundError: The store does not have it.
        """
        store, caller, name = self._store, caller_of(request), request.path_params["response_id"]
        check_text(name, "response_id")
        if store is None:
            raise missing(name)
        return await self._threads.do(lambda: work(store, caller.key, name), caller.number)

    async def _fields(self, request: Request, body: dict[str, Any]) -> InputFields:
        """Returns the fields of a prompt, with stored items in the places of references.

        Raises:
            NotFoundError: The store does not have one of the items.
            RequestError: A field is malformed.
        """
        fields = decode(body, InputFields)
        store, caller, items = self._store, caller_of(request), fields.items
        wanted = references(items)
        if not wanted:
            return fields
        if store is None:
            raise missing_item(wanted[0])
        found = await self._threads.do(lambda: resolved(items, partial(store.holding, caller.key)), caller.number)
        return msgspec.structs.replace(fields, input=found)

    async def _earlier(self, request: Request, fields: InputFields) -> list[Item]:
        """Returns the items of the responses that a request continues.

        Raises:
            NotFoundError: The store does not have one of them.
            RequestError: They are too many.
        """
        store, caller, name = self._store, caller_of(request), fields.previous_response_id
        if name is None:
            return []
        if store is None:
            raise missing(name, is_previous=True)
        earlier = await self._threads.do(lambda: all_items(store.chain(caller.key, name)), caller.number)
        if len(earlier) + len(fields.items) > MAX_CHAIN_ITEMS:
            raise RequestError(
                f"input has {len(fields.items)} items after {len(earlier)} of earlier responses; the most is "
                f"{MAX_CHAIN_ITEMS}. Send those that are still needed, without previous_response_id.",
                param="input",
            )
        return earlier

    async def _keep(self, request: Request, own: Sequence[Item], response: ResponseObject) -> None:
        """Stores a response that has ended, with the items of its request."""
        store, caller = self._store, caller_of(request)
        if store is None or not response.store:
            return

        def put() -> bool:
            items = [with_id(item) for item in own]
            number = len(items) + len(response.output)
            encode = msgspec.json.encode
            stored = StoredResponse(response.id, response.previous_response_id, encode(items), encode(response), number)
            return store.put(caller.key, stored, [each.id for each in (*items, *response.output) if each.id])

        try:
            if not await self._threads.do(put, caller.number):
                logger.warning("%s is larger than its caller's share of the store, and is not kept", response.id)
        except UnavailableError as error:
            logger.warning("%s is not kept: %s", response.id, error)


def page_of(items: list[Item], query: Mapping[str, str]) -> ItemList:
    """Returns one page of items.

    Args:
        items: The oldest first.
        query: ``limit``, ``order`` and ``after``.

    Raises:
        RequestError: One of them is not possible.
    """
    limit, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= MAX_PAGE:
        raise RequestError(f"limit must be a whole number between 1 and {MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc.", param="order")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise RequestError("after names no item of this response.", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ItemList(data=page, first_id=first, last_id=last, has_more=len(page) < len(ordered))
