"""The reply to a conversation, from its prompt to the start of its choices, the same in every protocol."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from starlette.requests import Request

from hiserve.core.request import SamplingParams
from hiserve.scheduler.client import EngineClient
from hiserve.server.generation import Choices, RequestContext, generations
from hiserve.server.grammar_fields import Constraint, constrain
from hiserve.server.logprobs import check_prompt_scores
from hiserve.server.routes import FrontEnd
from hiserve.server.sampling_fields import Limits, fit_context
from hiserve.server.streaming import cancel_on_disconnect
from hiserve.text.abilities import Thinking
from hiserve.text.conversation import Conversation

HIDDEN_TOOLS = "the chat template of this model does not show tools: the model cannot see the tools of this request"


class Question(NamedTuple):
    """What a request asks for, in no protocol's words.

    Attributes:
        chat: The conversation.
        sampling: Without a grammar.
        limits: The requested length.
        context: Caller and priority.
        constraint: The grammar of the reply, not vetted.
        truncate: As for ``PromptEncoder.encode_chat``.
        thinking: What is asked of thoughts.
    """

    chat: Conversation
    sampling: SamplingParams
    limits: Limits
    context: RequestContext
    constraint: Constraint | None = None
    truncate: int | None = None
    thinking: Thinking = Thinking()


async def begin_reply(
    front: FrontEnd, request: Request, engine: EngineClient, question: Question, name: str, arrived: float
) -> tuple[Choices, str]:
    """Returns the choices of the reply, which do not run yet, and a warning of what it does not do as asked, or nothing.

    Args:
        front: Encodes, vets and counts.
        request: The request; its body must have been read.
        engine: Has the length of the context.
        question: The conversation and what is asked for.
        name: Of the reply, in the log.
        arrived: ``time.monotonic()`` at arrival.

    Raises:
        RequestError: The conversation or its grammar cannot be used, or they do not fit.
        OverloadedError: As ``Vetting.check``.
        ClientDisconnect: The client went away.
    """
    chat = front.abilities.prepared(question.chat, question.thinking)
    sampling, context = question.sampling, question.context
    encoding = front.encoder.encode_chat(
        chat,
        namespace=context.namespace,
        max_tokens=engine.max_model_len,
        truncate=question.truncate,
        caller=context.caller,
    )
    prompt = await cancel_on_disconnect(request.receive, encoding)
    thought_end = front.abilities.thought_end(chat, prompt)
    sampling, warning = await constrain(front.vetting, request, sampling, question.constraint, sampling.n, thought_end)
    if sampling.prompt_logprobs is not None:
        check_prompt_scores(len(prompt) * (1 + sampling.prompt_logprobs), "prompt_logprobs")
    choices = generations(
        name,
        prompt,
        fit_context(sampling, question.limits, len(prompt), engine.max_model_len),
        context,
        token_bytes=front.token_bytes,
        metrics=front.metrics,
        arrived=arrived,
        output=partial(front.abilities.output, chat, prompt),
        locate=partial(front.encoder.place, chat, context.namespace, prompt),
        remember=partial(front.encoder.remember, context.namespace, chat),
    )
    if front.encoder.hides_tools(chat):
        front.metrics.hidden_tools.inc()
        warning = "; ".join(filter(None, (warning, HIDDEN_TOOLS)))
    return Choices(choices, sampling.n), warning
