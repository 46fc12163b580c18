"""One run against a server: look at it, build the requests, warm up, flush, send."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from hiserve.bench.datasets.recorded import agent_sessions, chats, conversation_trace, read_rows, required, text_like_it
from hiserve.bench.datasets.synthetic import check_fits, conversations, random_prompts, shared_prefixes
from hiserve.bench.http import Pool
from hiserve.bench.load import Begin, SoFar, arrivals, drive
from hiserve.bench.load_client import BACKENDS, Client, RequestDefaults
from hiserve.bench.options import (
    SYNTHETIC,
    ConnectionOptions,
    DataOptions,
    LimitOptions,
    LoadOptions,
    MultiturnOptions,
    chosen,
    filled,
)
from hiserve.bench.target import Counter, Target, flush, look_at, make_counter
from hiserve.bench.workload import Run, Workload, mirrored
from hiserve.errors import ConfigError

WARM_UP_TOKENS = 8
# Tokens that a chat template puts around one message, at most.
TEMPLATE_TOKENS = 64


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run and what it was a run of."""

    target: Target
    asking: RequestDefaults
    backend: str
    workload: Workload
    run: Run
    options: list[msgspec.Struct]  # as they were used: what the user left open is filled in


class ServerUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """An open connection and what is known about its other end."""

    pool: Pool
    client: Client
    target: Target
    backend: str
    tokenizer: Path | None

    async def counter(self, text: str) -> Counter:
        return await make_counter(self.pool, self.client, self.target, self.tokenizer, text)

    def outcome(self, workload: Workload, run: Run, options: list[msgspec.Struct]) -> RunOutcome:
        return RunOutcome(
            target=self.target,
            asking=self.client.asking,
            backend=self.backend,
            workload=workload,
            run=run,
            options=options,
        )


async def serve(
    connection: ConnectionOptions, data: DataOptions, load: LoadOptions, limits: LimitOptions, progress: Begin
) -> RunOutcome:
    """Sends a data set. Raises HiserveError."""
    _check(data, load)
    backend = connection.backend or ("openai-chat" if data.dataset == "chats" else "openai")
    ignore_eos = data.dataset in SYNTHETIC if connection.ignore_eos is None else connection.ignore_eos
    async with connected(connection, backend, ignore_eos=ignore_eos) as server:
        data = filled(data, device=server.target.device, max_model_len=server.target.max_model_len)
        workload = await build(data, server, limits.seed)
        starts = arrivals(workload, rate=load.request_rate, burstiness=load.burstiness, seed=limits.seed)
        return await _measure(server, workload, starts, [data, load, limits], limits, progress)


async def multiturn(
    connection: ConnectionOptions, rounds: MultiturnOptions, limits: LimitOptions, progress: Begin
) -> RunOutcome:
    """Holds chats in a closed loop. Raises HiserveError."""
    ignore_eos = connection.ignore_eos is not False
    async with connected(connection, connection.backend or "openai", ignore_eos=ignore_eos, has_ids=True) as server:
        rounds = filled(rounds, device=server.target.device, max_model_len=server.target.max_model_len)
        sessions = conversations(
            count=rounds.num_clients,
            lengths=[rounds.request_length] * rounds.num_rounds,
            output_length=rounds.output_length,
            think_s=rounds.think_time,
            shared_length=rounds.shared_length,
            vocab_size=server.target.require_vocab_size(),
            seed=limits.seed,
        )
        workload = Workload(name="multiturn", sessions=sessions)
        check_fits(workload, server.target.max_model_len)
        return await _measure(server, workload, [0.0] * rounds.num_clients, [rounds, limits], limits, progress)


async def build(data: DataOptions, server: ServerUnderTest, seed: int) -> Workload:
    """Returns the requests of a data set, cut to the server's model; sizes have been filled in. Raises HiserveError."""
    return made_up(data, server.target, seed) if data.dataset in SYNTHETIC else await _recorded(data, server)


def made_up(data: DataOptions, target: Target, seed: int) -> Workload:
    """Returns the requests of a data set whose token ids are drawn. Raises HiserveError."""
    vocab_size = target.require_vocab_size()
    if data.dataset == "conversation-trace":
        return conversation_trace(
            required(data.path, f"--dataset {data.dataset}"),
            speed=data.speed,
            block_tokens=data.block_tokens,
            num_prompts=data.num_prompts,
            max_model_len=target.max_model_len,
            vocab_size=vocab_size,
            seed=seed,
        )
    if data.dataset == "random":
        workload = random_prompts(
            num_prompts=chosen(data.num_prompts),
            input_length=data.input_length,
            output_length=chosen(data.output_length),
            range_ratio=data.random_range_ratio,
            vocab_size=vocab_size,
            seed=seed,
        )
    else:
        workload = shared_prefixes(
            num_groups=data.num_groups,
            prompts_per_group=data.prompts_per_group,
            system_length=data.system_length,
            question_length=data.question_length,
            output_length=chosen(data.output_length),
            num_prompts=data.num_prompts,
            vocab_size=vocab_size,
            seed=seed,
        )
    check_fits(workload, target.max_model_len)
    return workload


async def _recorded(data: DataOptions, server: ServerUnderTest) -> Workload:
    path = required(data.path, f"--dataset {data.dataset}")
    if data.dataset == "chats":
        counter = await server.counter(text_like_it(path))
        workload = await chats(path, counter=counter, num_prompts=data.num_prompts, output_length=data.output_length)
    else:
        rows, num_empty = read_rows(path, data.num_prompts)
        counter = await server.counter(rows[0].input)
        workload = await agent_sessions(
            rows,
            num_empty,
            counter=counter,
            speed=data.speed,
            max_model_len=server.target.max_model_len,
            output_length=data.output_length,
            reserve=TEMPLATE_TOKENS if server.backend == "openai-chat" else 0,
        )
    estimated = {} if counter.is_exact else {"lengths_estimated": workload.num_turns}
    return msgspec.structs.replace(workload, notes=workload.notes | estimated)


@asynccontextmanager
async def connected(
    connection: ConnectionOptions, backend: str, *, ignore_eos: bool, has_ids: bool = False
) -> AsyncIterator[ServerUnderTest]:
    """Looks at a server and closes the connections to it at the end. Raises HiserveError."""
    pool = Pool(connection.url, read_key(connection.api_key_file))
    try:
        target = await look_at(pool, model=connection.model_name, vocab_size=connection.vocab_size)
        asking = RequestDefaults(
            model=target.model,
            temperature=connection.temperature,
            ignore_eos=ignore_eos,
            has_token_ids=has_ids,
        )
        client = Client(pool, BACKENDS[backend](), asking, connection.timeout)
        yield ServerUnderTest(pool=pool, client=client, target=target, backend=backend, tokenizer=connection.tokenizer)
    finally:
        pool.close()


async def warm_up(server: ServerUnderTest, workload: Workload, limits: LimitOptions) -> None:
    """Sends a request like the first one, then flushes the cache if wanted. Raises HiserveError."""
    first = workload.sessions[0][0]
    await server.client.warm_up(mirrored(first.prompt), min(WARM_UP_TOKENS, first.max_tokens))
    if limits.flush_cache:
        await flush(server.pool)


async def _measure(
    server: ServerUnderTest,
    workload: Workload,
    starts: list[float],
    options: list[msgspec.Struct],
    limits: LimitOptions,
    progress: Begin,
) -> RunOutcome:
    await warm_up(server, workload, limits)
    run = await drive(
        workload,
        server.client.send,
        starts=starts,
        max_concurrency=limits.max_concurrency,
        on_done=SoFar(progress(workload.num_turns)).add,
    )
    return server.outcome(workload, run, options)


def _check(data: DataOptions, load: LoadOptions) -> None:
    is_timed = data.dataset in ("conversation-trace", "agent-sessions")
    if is_timed and not math.isinf(load.request_rate):
        raise ConfigError(
            f"{data.dataset} has its own times, which --request-rate would replace; change them with --speed.",
            param="request_rate",
        )


def read_key(file: Path | None) -> str | None:
    """Returns the API key in a file; None without one. Raises ConfigError."""
    try:
        return None if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --api-key-file {file}: {error}.", param="api_key_file") from None
