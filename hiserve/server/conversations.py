"""The reply to a conversation, from its prompt to the start of its choices, the same in every protocol."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from hiserve.config.serving import MAX_INT32
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.grammar.tools import ToolField, ToolSchema
from hiserve.scheduler.client import EngineClient
from hiserve.server.http.auth import caller_of, namespace_of
from hiserve.server.http.streaming import cancel_on_disconnect
from hiserve.server.reply.choices import Choices, generations
from hiserve.server.reply.generation import RequestContext
from hiserve.server.reply.logprobs import check_prompt_scores
from hiserve.server.request.body import MAX_CHARS
from hiserve.server.request.grammar_fields import Constraint, check_shown, constrain, of_chat, with_budget
from hiserve.server.request.sampling_fields import Limits, fit_context
from hiserve.server.routes import FrontEnd
from hiserve.text.abilities import Thinking
from hiserve.text.conversation import Conversation

HIDDEN_TOOLS = "the chat template of this model does not show tools: the model cannot see the tools of this request"


class ChatRequest(NamedTuple):
    """A request for a reply to a conversation, the same in every protocol.

    Attributes:
        chat: The conversation.
        sampling: Without a grammar.
        limits: The requested length.
        context: Caller and priority.
        constraint: The grammar of the reply, not vetted; without one it may be of the tools.
        truncate: As for ``PromptEncoder.encode_chat``.
        thinking: Its switches of thoughts.
        retain_s: How long the cache evicts the whole prompt last, from its last use; 0 is not at all.
        tool_fields: As for ``ToolGrammars.of``.
        shown: Grammars of tools that the model only sees.
    """

    chat: Conversation
    sampling: SamplingParams
    limits: Limits
    context: RequestContext
    constraint: Constraint | None = None
    truncate: int | None = None
    thinking: Thinking = Thinking()
    retain_s: int = 0
    tool_fields: Sequence[ToolField] = ()
    shown: Sequence[ToolSchema] = ()


async def begin_reply(
    front: FrontEnd, request: Request, engine: EngineClient, chat_request: ChatRequest, name: str, arrived: float
) -> tuple[Choices, str]:
    """Returns the choices of the reply, not started, and a warning that names the parts of the request without effect; empty for none.

    Args:
        front: Encodes, vets and counts.
        request: The request; its body must have been read.
        engine: Has the length of the context.
        chat_request: The request.
        name: Of the reply, in the log.
        arrived: ``time.monotonic()`` at arrival.

    Raises:
        RequestError: The conversation or its grammar cannot be used, or they do not fit.
        OverloadedError: As ``Vetting.check``.
        ClientDisconnect: The client went away.
    """
    chat = front.abilities.prepared(chat_request.chat, chat_request.thinking)
    sampling, context = chat_request.sampling, chat_request.context
    constraint = of_chat(chat_request.constraint, front.tool_grammars, chat, chat_request.tool_fields)
    prompt = await encode_prompt(
        front,
        request,
        chat,
        context.namespace,
        max_tokens=engine.max_model_len,
        truncate=chat_request.truncate,
        field=chat_request.limits.prompt_field,
    )
    sampling = fit_context(sampling, chat_request.limits, len(prompt), engine.max_model_len)
    if sampling.prompt_logprobs is not None:
        check_prompt_scores(len(prompt) * (1 + sampling.prompt_logprobs), "prompt_logprobs")
    # No grammar of a request that is refused for its length is tried.
    await check_shown(front.vetting, request, chat_request.shown)
    marks = front.abilities.marks(chat, prompt, is_free=constraint is None)
    sampling, warning = await constrain(front.vetting, request, sampling, constraint, sampling.n, marks)
    sampling = with_budget(sampling, marks, chat_request.thinking.budget)
    retain = await front.encoder.retain(chat, context.namespace, prompt, front.token_bytes, context.caller)
    retain += ((len(prompt), chat_request.retain_s),) if chat_request.retain_s else ()
    choices = generations(
        name,
        prompt,
        sampling,
        context._replace(retain=retain),
        token_bytes=front.token_bytes,
        metrics=front.metrics,
        arrived=arrived,
        draw_seed=front.draw_seed(request),
        output=partial(front.abilities.output, chat, prompt),
        locate=partial(front.encoder.place, chat, context.namespace, prompt),
        remember=partial(front.encoder.remember, context.namespace, chat),
        keeps_tokens=chat_request.limits.max_tokens != 0,
    )
    if front.encoder.hides_tools(chat):
        front.metrics.hidden_tools.inc()
        warning = "; ".join(filter(None, (warning, HIDDEN_TOOLS)))
    return Choices(choices, sampling.n), warning


async def encode_prompt(
    front: FrontEnd,
    request: Request,
    chat: Conversation,
    namespace: bytes,
    *,
    max_tokens: int,
    field: str,
    truncate: int | None = None,
) -> Int32Array:
    """Returns the ids of a conversation, int32 ``[n]``.

    Args:
        front: Encodes.
        request: The request; its body must have been read.
        chat: The conversation.
        namespace: As for ``PromptEncoder.encode_chat``, like the next.
        max_tokens: Context length.
        field: The field of the request that has the conversation, for errors.
        truncate: As for ``PromptEncoder.encode_chat``.

    Raises:
        RequestError: The model has no chat template, or refuses the conversation, or the conversation does not fit.
        ClientDisconnect: The client went away.
    """
    encoding = front.encoder.encode_chat(
        chat, namespace=namespace, max_tokens=max_tokens, truncate=truncate, caller=caller_of(request).number
    )
    try:
        return await cancel_on_disconnect(request.receive, encoding)
    except RequestError as error:
        if error.param == "messages":
            error.param = field
        raise


async def count_tokens(
    front: FrontEnd, request: Request, chat: Conversation, thinking: Thinking, field: str, cache_salt: str | None = None
) -> int:
    """Returns the number of tokens of a conversation, which may exceed the context.

    Args:
        front: Encodes.
        request: As for ``encode_prompt``.
        chat: The conversation.
        thinking: Its switches of thoughts.
        field: As for ``encode_prompt``.
        cache_salt: As for ``namespace_of``.

    Raises:
        RequestError: The conversation is too long to be counted, or as for ``encode_prompt``.
    """
    if chat.num_chars > MAX_CHARS:
        raise RequestError(f"{field} must be at most {MAX_CHARS} characters long.", param=field)
    chat, namespace = front.abilities.prepared(chat, thinking), namespace_of(request, cache_salt)
    return len(await encode_prompt(front, request, chat, namespace, max_tokens=MAX_INT32, field=field))


def without_oldest(chat: Conversation) -> Conversation | None:
    """Returns a conversation without its oldest exchanges, an eighth of it at least; None if the last alone is left.

    An exchange begins with a turn of the user. System turns at the start are kept.
    """
    begins = [i for i, turn in enumerate(chat.turns) if turn.role == "user"]
    num_kept = next((i for i, turn in enumerate(chat.turns) if turn.role != "system"), 0)
    ends = [i for i in begins if i > num_kept]
    if not ends:
        return None
    num_chars = list(accumulate(len(turn.text) + 16 for turn in chat.turns[num_kept:]))
    least = num_chars[-1] / 8
    end = next((i for i in ends if num_chars[i - num_kept - 1] >= least), ends[-1])
    return msgspec.structs.replace(chat, turns=chat.turns[:num_kept] + chat.turns[end:])
