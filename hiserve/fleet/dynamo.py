"""An engine for Dynamo: ``python -m hiserve.fleet.dynamo --namespace NAME [NAME=VALUE ...]``, settings as of ``hiserve serve``.

Dynamo's frontend has the API, tokenizes, routes by our KV events and moves streams of workers that die; this process generates
tokens from tokens. Needs ai-dynamo and ai-dynamo-runtime 1.6.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import InvalidArgument

from hiserve.config.options import Options, make_options
from hiserve.core.endpoints import new_endpoint, remove, topic_of
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import ConfigError, HiserveError, RequestError
from hiserve.ipc.child import LOG_FORMAT
from hiserve.ipc.updates import TokenDelta
from hiserve.launch import Launch, prepare
from hiserve.models.model_config import find_model
from hiserve.scheduler.client import EngineClient
from hiserve.server.reply.logprobs import unpack
from hiserve.server.reply.seals import Seeds
from hiserve.text.body.parser import parse_prompt

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "cancelled"}
Fields = Mapping[str, Any]


class Engine(LLMEngine):  # type: ignore[misc]
    """Runs one engine under a worker of Dynamo.

    Args:
        options: As given; without ``--kv-events`` the worker reads them from a socket that this user alone reaches.
    """

    def __init__(self, options: Options) -> None:
        self._own_events = ""
        if options.cache.kv_events is None and not options.cache.disable_prefix_cache:
            self._own_events = new_endpoint()
            cache = msgspec.structs.replace(options.cache, kv_events=self._own_events)
            options = msgspec.structs.replace(options, cache=cache)
        self._options = options
        self._seeds = Seeds(options.server.seal_key)
        self._defaults = SamplingParams()
        self._vocab_size = 0  # of the model, once it is started
        self._client: EngineClient | None = None

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[Engine, WorkerConfig]:
        """Returns the engine, not started, and what its worker registers.

        Raises:
            HiserveError: A setting, or the model, is none that can be used.
        """
        parser = argparse.ArgumentParser("hiserve.fleet.dynamo", description="An engine for Dynamo.")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="backend")
        parser.add_argument("--endpoint", default="generate")
        parser.add_argument("--endpoint-types", default="chat,completions")
        parser.add_argument("--discovery-backend", default="file", choices=["kubernetes", "etcd", "file", "mem"])
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane", default="zmq")
        parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="as of hiserve serve")
        given = parser.parse_args(argv)
        settings = dict(each.partition("=")[::2] for each in given.settings)
        options = make_options(**settings)
        logging.basicConfig(level=options.server.log_level.upper(), format=LOG_FORMAT)
        if options.parallel.replicas != 1:
            raise ConfigError(
                f"replicas is {options.parallel.replicas}; Dynamo knows the cache of each worker. Start one process for each.",
                param="replicas",
            )
        engine = cls(options)
        config = WorkerConfig(
            namespace=given.namespace,
            component=given.component,
            endpoint=given.endpoint,
            endpoint_types=given.endpoint_types,
            model_name=str(
                find_model(options.model.model)
            ),  # a folder: the frontend reads tokenizer and template there
            served_model_name=engine.name,
            discovery_backend=given.discovery_backend,
            request_plane=given.request_plane,
            event_plane=given.event_plane,
        )
        return engine, config

    @property
    def name(self) -> str:
        """The model's name in requests."""
        given = self._options
        return given.server.served_model_name or Path(given.model.model).expanduser().resolve().name

    async def start(self, worker_id: int) -> EngineConfig:
        """Starts the engine; returns what routers know of it.

        Raises:
            HiserveError: The model, the settings or the engine's start.
        """
        launch: Launch = await asyncio.to_thread(prepare, self._options)
        launch.log()
        settings = await asyncio.to_thread(launch.identified)
        self._vocab_size = launch.model.vocab_size
        if settings.model.sampling_defaults != "openai":
            self._defaults = launch.model.sampling_defaults.params()
        self._client = await EngineClient.start(settings)
        scheduler, cache = settings.scheduler, settings.cache
        return EngineConfig(
            model=str(launch.folder),
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=settings.model.max_model_len,
                kv_cache_block_size=cache.page_size,
                total_kv_blocks=cache.kv_pages,
                max_num_seqs=scheduler.max_running_requests,
                max_num_batched_tokens=scheduler.max_batched_tokens,
            ),
        )

    async def generate(self, request: Fields, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the tokens of a request as they come.

        A stream that Dynamo moves here has the tokens of the worker that died at the end of its prompt. They are drawn alike, as
        the seed is that of the request's id and noise that of a place; penalties count them as prompt.

        Raises:
            InvalidArgument: A value is out of range, a token is none of the model's, or what is asked for is not built.
        """
        assert self._client is not None, "not started"
        num_generated = num_cached = 0
        try:
            # The frontend passes on the tokens of its clients, and the engine computes any.
            prompt = parse_prompt(list(request["token_ids"]), vocab_size=self._vocab_size, param="token_ids")
            assert not isinstance(prompt, str), "tokens become a text"
            sampling = sampling_of(request, self._defaults, self._seeds.draw(context.id(), 0), self._vocab_size)
            stream = self._client.generate(prompt, sampling, tag=context.id())
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    num_generated += len(delta.tokens)
                    num_cached = num_cached if delta.cached is None else delta.cached.num_tokens
                    chunk = chunk_of(delta, sampling.logprobs)
                    if delta.finish:
                        total = prompt.size + num_generated
                        chunk["completion_usage"] = {
                            "prompt_tokens": prompt.size,
                            "completion_tokens": num_generated,
                            "total_tokens": total,
                            "prompt_tokens_details": {"cached_tokens": num_cached},
                        }
                    if delta.tokens or delta.finish:
                        yield chunk
        except RequestError as error:
            raise InvalidArgument(str(error)) from error

    async def abort(self, context: Any) -> None:
        """Aborts a request whose client is gone."""
        if self._client is not None and context.id():
            self._client.abort(context.id())

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Returns the socket of the worker's events, if it has one."""
        given = self._options.cache.kv_events
        if given is None:
            return []
        endpoint, topic = topic_of(given)
        return [ZmqSource(endpoint=endpoint.replace("*", "127.0.0.1"), topic=topic, dp_rank=0)]

    async def cleanup(self) -> None:
        """Stops the engine."""
        client, self._client = self._client, None
        if client is not None:
            await client.stop()
        if self._own_events:
            remove(self._own_events)
            self._own_events = ""


def sampling_of(request: Fields, defaults: SamplingParams, seed: int, vocab_size: int) -> SamplingParams:
    """Returns the sampling parameters of a request; stop texts are the frontend's business.

    Args:
        request: As Dynamo's frontend makes it.
        defaults: Of the model.
        seed: For a request without one.
        vocab_size: Of the model; end tokens that the frontend reads in its files may be beyond it.

    Raises:
        RequestError: A value is out of range, or what it asks for is not built.
    """
    wanted: Fields = request.get("sampling_options") or {}
    stops: Fields = request.get("stop_conditions") or {}
    shown: Fields = request.get("output_options") or {}
    if wanted.get("n") not in (None, 1):
        raise RequestError(f"n is {wanted['n']}; behind Dynamo a request has one choice.", param="n")
    if wanted.get("guided_decoding"):
        raise RequestError("grammars of replies are not supported behind Dynamo.", param="guided_decoding")
    given = {name: wanted[name] for name in SAMPLING if wanted.get(name) is not None}
    if bias := given.get("logit_bias"):
        given["logit_bias"] = {int(token): value for token, value in bias.items()}
    hidden = [token for token in stops.get("stop_token_ids_hidden") or () if token < vocab_size]
    ends = [*(stops.get("stop_token_ids") or ()), *hidden]
    num_top = shown.get("logprobs")
    sampling = msgspec.structs.replace(
        defaults,
        **{"seed": seed} | given,
        max_tokens=stops.get("max_tokens"),
        min_tokens=stops.get("min_tokens") or 0,
        ignore_eos=bool(stops.get("ignore_eos")),
        stop_token_ids=tuple(dict.fromkeys(ends)),
        logprobs=None if num_top in (None, "") else int(num_top),
    )
    sampling.check_vocabulary(vocab_size)
    return sampling


def chunk_of(delta: TokenDelta, num_top: int | None) -> dict[str, Any]:
    """Returns a delta in Dynamo's form, with scores where they were asked for."""
    chunk: dict[str, Any] = {"token_ids": delta.tokens, "index": 0}
    if delta.finish:
        chunk["finish_reason"] = REASONS[delta.finish]
    if num_top is not None and delta.tokens:
        scored = unpack(delta.tokens, bytes(delta.scores), num_top)
        chunk["log_probs"] = [one.logprob for one in scored]
        if num_top:
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                    for rank, (token, logprob) in enumerate(one.top, 1)
                ]
                for one in scored
            ]
    return chunk


def main(argv: Sequence[str] | None = None) -> None:
    """Serves under Dynamo until a signal; exits with a sentence where a setting is wrong."""
    try:
        run(Engine, argv)
    except HiserveError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
