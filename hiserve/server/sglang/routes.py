"""``/generate`` in SGLang's format: each event of a stream holds the whole text so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason
from hiserve.errors import RequestError
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import DONE, answer, cancel_on_disconnect, event
from hiserve.server.reply.choices import Choices, generations
from hiserve.server.reply.format import cache_miss, spec_details, warned
from hiserve.server.reply.generation import Generation, OutputDelta, nothing
from hiserve.server.reply.logprobs import Scored, Spell, check_prompt_scores, scored_prompt, token_text, unpack
from hiserve.server.request.body import Body
from hiserve.server.request.grammar_fields import constrain
from hiserve.server.request.resumption import resume, resumed_tokens
from hiserve.server.request.sampling_fields import fit_context
from hiserve.server.routes import Endpoint, FrontEnd, context_of
from hiserve.server.sglang.types import (
    Entries,
    Entry,
    FinishInfo,
    Generated,
    GenerateRequest,
    MetaInfo,
    NativePrompt,
    NativeSampling,
    StorageTokensDetails,
)
from hiserve.text.body.json import decode

GENERATE = Body("GenerateRequest", (GenerateRequest,), inner=(NativeSampling,), either=("text", "input_ids"))
InThread = Callable[[Callable[[], Generated]], Awaitable[Generated]]


class NativeRoutes:
    """Handler of ``/generate``.

    Args:
        front: Shared with other handlers.
    """

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    def routes(self) -> list[Endpoint]:
        """Returns the route."""
        reply = Generated | list[Generated]
        return [Endpoint("/generate", self.generate, "POST", body=GENERATE, reply=reply, streams=True)]

    async def generate(self, request: Request) -> Response:
        """Continues texts or lists of token ids."""
        arrived, front = time.monotonic(), self._front
        body = await front.bodies.read(request, GENERATE)
        self._check_sampling(body.get("sampling_params"))
        fields = decode(body, GenerateRequest)
        prompts = fields.prompts(front.model)
        num_choices = sum(one.sampling.n for one in prompts)
        resumed = resumed_tokens(
            fields.resume_token_ids, front.model, is_stream=bool(fields.stream), num_choices=num_choices
        )
        engine = front.handle.require()
        encoding = self._encode(prompts, engine.max_model_len, caller_of(request).number)
        encoded = await cancel_on_disconnect(request.receive, encoding)
        fitted = [
            fit_context(one.sampling, one.limits, len(prompt), engine.max_model_len)
            for one, prompt in zip(prompts, encoded, strict=True)
        ]  # before a grammar is tried
        warnings = set[str]()
        for index, (one, sampling) in enumerate(zip(prompts, fitted, strict=True)):
            sampling, warning = await constrain(front.vetting, request, sampling, one.constraint, num_choices)
            prompts[index] = msgspec.structs.replace(one, sampling=sampling)
            warnings.add(warning)
        num_scores = (one.num_prompt_scores(len(prompt)) for one, prompt in zip(prompts, encoded, strict=True))
        check_prompt_scores(sum(num_scores), "logprob_start_len")
        choices, formatters = self._choices(request, fields, prompts, encoded, arrived)
        for generation, shown in await resume(resumed, choices, front.model, engine.max_model_len):
            formatters[generation.choice].resume(shown)
        is_list = fields.is_batch or len(formatters) > 1

        def whole() -> Any:
            for formatter, generation in zip(formatters, choices.generations, strict=True):
                formatter.take(generation.whole())
            replies = [formatter.reply() for formatter in formatters]
            return replies if is_list else replies[0]

        def stream(deltas: AsyncGenerator[OutputDelta, None]) -> AsyncGenerator[bytes, None]:
            in_thread = partial(front.format_threads.do, caller=caller_of(request).number)
            return _events(deltas, formatters, in_thread, has_index=is_list)

        threads = front.format_threads
        response = await answer(
            request, engine, choices, threads, whole=whole, events=stream if fields.stream else None
        )
        return warned(response, "; ".join(sorted(filter(None, warnings))))

    def _check_sampling(self, given: Any) -> None:
        """Refuses fields of ``sampling_params`` that are not served.

        Raises:
            RequestError: There is one.
        """
        for fields in given if isinstance(given, list) else [given]:
            try:
                self._front.bodies.check(fields if isinstance(fields, dict) else {}, NativeSampling)
            except RequestError as error:
                raise RequestError(f"sampling_params.{error.message}", param=f"sampling_params.{error.param}") from None

    def _choices(
        self,
        request: Request,
        fields: GenerateRequest,
        prompts: list[NativePrompt],
        encoded: list[Int32Array],
        arrived: float,
    ) -> tuple[Choices, list[NativeFormatter]]:
        """Returns all choices, and a formatter for each."""
        front, made = self._front, list[Generation]()
        formatters: list[NativeFormatter] = []
        for i, (one, prompt) in enumerate(zip(prompts, encoded, strict=True)):
            name = one.rid or request.state.request_id + (f"-{i}" if len(encoded) > 1 else "")
            choices = generations(
                name,
                prompt,
                one.sampling,
                context_of(request, fields.cache_salt, fields.priority, one.rid),
                token_bytes=front.token_bytes,
                metrics=front.metrics,
                arrived=arrived,
                draw_seed=front.draw_seed(request),
                first=len(made),
                keeps_tokens=one.limits.max_tokens != 0,
            )
            made += choices
            formatters += [
                NativeFormatter(
                    generation,
                    first_scored=one.first_scored,
                    spell=front.token_bytes.bytes_of if fields.return_text_in_logprobs else None,
                    name=name,
                    version=front.model.fingerprint,
                    arrived=arrived,
                )
                for generation in choices
            ]
        return Choices(made), formatters

    async def _encode(self, prompts: list[NativePrompt], max_model_len: int, caller: int) -> list[Int32Array]:
        encoded = []
        for one in prompts:
            prompt = one.prompt
            if isinstance(prompt, str):
                encoding = self._front.encoder.encode_text(
                    prompt, max_tokens=max_model_len, param="text", caller=caller
                )
                prompt = await encoding
                await asyncio.sleep(0)  # other requests come in between
            encoded.append(prompt)
        return encoded


async def _events(
    deltas: AsyncGenerator[OutputDelta, None],
    formatters: list[NativeFormatter],
    in_thread: InThread,
    *,
    has_index: bool,
) -> AsyncGenerator[bytes, None]:
    """Yields an event for each delta, with its choice so far."""
    async with aclosing(deltas):
        async for output_delta in deltas:
            formatter = formatters[output_delta.choice]
            formatter.take(output_delta)
            reply = await in_thread(formatter.reply) if formatter.is_large else formatter.reply()
            if has_index:
                reply.index = output_delta.choice
            yield event(reply)
    yield DONE


class NativeFormatter:
    """Formats one choice as it grows.

    Args:
        generation: The choice.
        first_scored: Tokens of the prompt from this index on are shown with their logprobs; None shows none.
        spell: Spells the tokens with logprobs; None omits their texts.
        name: Its ``id``.
        version: The model's fingerprint.
        arrived: ``time.monotonic()`` at the request's arrival.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        first_scored: int | None,
        spell: Spell | None,
        name: str,
        version: str,
        arrived: float,
    ) -> None:
        self._generation = generation
        self._first_scored = first_scored
        self._spell = spell
        self._name = name
        self._version = version
        self._arrived = arrived
        self._text = ""
        self._tokens: list[int] = []
        self._entries: Entries = []
        self._tops: list[Entries] = []
        self._input: dict[str, msgspec.Raw] = {}
        self._last = nothing(generation.choice)

    @property
    def is_large(self) -> bool:
        """Whether formatting the next reply takes long: it is the first with the scores of a long prompt."""
        return self._first_scored is not None and not self._input and self._generation.scorer.has_many_prompt_scores

    def resume(self, shown: OutputDelta) -> None:
        """Begins the choice with what its client has: each event repeats it, but for the scores, which only the client has."""
        self._text, self._tokens = shown.text, list(shown.tokens)

    def take(self, output_delta: OutputDelta) -> None:
        """Adds a delta."""
        self._last = output_delta
        self._text += output_delta.text
        self._tokens += output_delta.tokens
        num_top = self._generation.sampling.logprobs
        if num_top is not None:
            scored = unpack(output_delta.tokens, output_delta.scores, num_top)
            self._entries += map(self._entry, scored)
            self._tops += map(self._top, scored)

    def reply(self) -> Generated:
        """Returns the choice so far."""
        generation, is_over = self._generation, self._last.finish is not FinishReason.RUNNING
        cached, num_top = generation.cached, generation.sampling.logprobs
        meta = MetaInfo(
            id=self._name,
            finish_reason=self._finish_reason() if is_over else None,
            prompt_tokens=len(generation.prompt),
            completion_tokens=len(self._tokens),
            cached_tokens=cached.num_tokens,
            cached_tokens_details=StorageTokensDetails(cached.device, cached.host, cached.store),
            cache_miss=cache_miss(cached),
            weight_version=self._version,
            spec_tokens_details=spec_details(generation.facts.drafts),
        )
        if is_over:
            meta.e2e_latency = time.monotonic() - self._arrived
        if generation.facts.queue_s >= 0:
            meta.queue_time = generation.facts.queue_s
        if num_top is not None:
            meta.output_token_logprobs = self._entries
            if num_top:
                meta.output_top_logprobs = self._tops
            if self._first_scored is not None:
                self._input = self._input or self._input_logprobs(self._first_scored, has_top=num_top > 0)
                for name, scores in self._input.items():
                    setattr(meta, name, scores)
        return Generated(self._text, self._tokens, meta)

    def _finish_reason(self) -> FinishInfo:
        output_delta = self._last
        if output_delta.finish is FinishReason.LENGTH:
            return FinishInfo("length", length=len(self._tokens))
        if output_delta.finish is FinishReason.ABORT:
            return FinishInfo("abort", message="the request was aborted.")
        ended_by = self._tokens[-1] if output_delta.stop is None and self._tokens else output_delta.stop
        return FinishInfo("stop", matched=ended_by)

    def _input_logprobs(self, first_scored: int, *, has_top: bool) -> dict[str, msgspec.Raw]:
        """Returns the scores of the prompt, encoded once because each event of a stream repeats them."""
        # The first token that is shown has no score.
        tokens, scored = scored_prompt(self._generation)
        first, known = tokens[first_scored:][:1], scored[first_scored:]
        unknown: list[Entry] = [(None, token, self._text_of(token)) for token in first]
        shown: dict[str, list[Any]] = {"input_token_logprobs": unknown + [self._entry(entry) for entry in known]}
        if has_top:
            shown["input_top_logprobs"] = [None] * len(first) + [self._top(entry) for entry in known]
        return {name: msgspec.Raw(msgspec.json.encode(entries)) for name, entries in shown.items()}

    def _entry(self, scored: Scored) -> Entry:
        return scored.logprob, scored.token, self._text_of(scored.token)

    def _top(self, scored: Scored) -> list[Entry]:
        return [(logprob, token, self._text_of(token)) for token, logprob in scored.top]

    def _text_of(self, token: int) -> str | None:
        return None if self._spell is None else token_text(self._spell(token))
