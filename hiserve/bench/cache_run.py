"""One run that measures a server's cache: look at it, build, warm up, flush, read counters, send, read them again."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import numpy as np

from hiserve.bench.cache_summary import Held, Visit, endless_cache
from hiserve.bench.datasets.recorded import (
    TRACE_BLOCK_TOKENS,
    AgentRecord,
    read_rows,
    required,
    shortened,
)
from hiserve.bench.datasets.synthetic import check_fits, conversations
from hiserve.bench.load import Begin, Send, SoFar, drive, drive_in_groups
from hiserve.bench.online import RunOutcome, ServerUnderTest, connected, made_up, warm_up
from hiserve.bench.options import CacheLoadOptions, ConnectionOptions, DataOptions, LimitOptions, chosen, filled
from hiserve.bench.scrape import CacheStatsReply, CopyCounts, Series, copied, increases, read_caches, scrape
from hiserve.bench.target import Encoder, Target, make_encoder
from hiserve.bench.workload import Prompt, Run, Sample, Turn, Workload
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, and the token ids of every prompt in it that is a text."""

    workload: Workload
    encoded: dict[str, Int32Array] = {}


async def build(
    load: CacheLoadOptions, target: Target, make_encoder: Callable[[], Awaitable[Encoder]], seed: int
) -> Requests:
    """Returns the requests of a load; what does not fit the context is refused, cut or left out. Raises HiserveError."""
    if load.load == "agent-sessions":
        rows, num_empty = read_rows(required(load.path, f"--load {load.load}"), load.num_prompts)
        return await _agents(load, rows, num_empty, target.max_model_len, await make_encoder())
    if load.load == "multi-turn":
        lengths = [load.conversation_length, *[load.request_length] * (load.num_rounds - 1)]
        sessions = conversations(
            count=load.num_conversations,
            lengths=[_scaled(load, length) for length in lengths],
            output_length=chosen(load.output_length),
            vocab_size=target.require_vocab_size(),
            seed=seed,
        )
        workload = Workload(name="multi-turn", sessions=sessions)
        check_fits(workload, target.max_model_len)
        return Requests(workload=workload)
    is_trace = load.load == "conversation-trace"
    data = DataOptions(
        dataset=load.load,
        path=required(load.path, f"--load {load.load}") if is_trace else None,
        num_prompts=load.num_prompts,
        speed=load.speed,
        block_tokens=_scaled(load, TRACE_BLOCK_TOKENS),
        num_groups=load.num_prefixes,
        prompts_per_group=load.suffixes_per_prefix,
        system_length=_scaled(load, load.prefix_length),
        question_length=_scaled(load, load.suffix_length),
        output_length=load.output_length,
    )
    workload = made_up(data, target, seed)
    return Requests(workload=_with_replies(workload, load) if is_trace else workload)


async def _agents(
    load: CacheLoadOptions, rows: list[AgentRecord], num_empty: int, max_model_len: int | None, encoder: Encoder
) -> Requests:
    """Returns one session for each agent, its prompts as they were; it ends before the first that does not fit.

    To cut a prompt's front would change what every later page holds, and so measure the cut.
    """
    room = math.inf if max_model_len is None else max_model_len
    sessions: dict[str, list[Turn]] = {}
    encoded: dict[str, Int32Array] = {}
    ended: set[str] = set()
    notes = {"empty_prompts_left_out": num_empty, "too_long_prompts_left_out": 0}
    for row in rows:
        prompt, reply = shortened(row.input, load.length_scale), shortened(row.output, load.length_scale)
        if row.session_id not in ended:
            ids = await encoder.encode(prompt)
            max_tokens = load.output_length or max(1, (await encoder.encode(reply)).size)
            if ids.size + max_tokens > room:
                ended.add(row.session_id)
        if row.session_id in ended:
            notes["too_long_prompts_left_out"] += 1
            continue
        encoded[prompt] = ids
        at_s = (row.timestamp_us - rows[0].timestamp_us) / 1e6 / load.speed
        sessions.setdefault(row.session_id, []).append(Turn(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    if not sessions:
        raise ConfigError(
            f"no session's first prompt and reply fit the model's context of {max_model_len} tokens. Give a smaller "
            "--length-scale.",
            param="length_scale",
        )
    return Requests(
        workload=Workload(name="agent-sessions", sessions=list(sessions.values()), notes=notes), encoded=encoded
    )


def _with_replies(workload: Workload, load: CacheLoadOptions) -> Workload:
    """Returns the workload with replies cut to the given length, if there is one."""
    if load.output_length is None:
        return workload
    sessions = [
        [msgspec.structs.replace(turn, max_tokens=min(turn.max_tokens, load.output_length)) for turn in turns]
        for turns in workload.sessions
    ]
    return msgspec.structs.replace(workload, sessions=sessions)


def _scaled(load: CacheLoadOptions, length: int) -> int:
    return max(1, round(length * load.length_scale))


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run and what it is compared with."""

    outcome: RunOutcome
    page_size: int  # tokens per page of the endless cache
    held: list[Held]  # what that one held of each sample's prompt
    counters: Series  # by how much each of the server's counters grew; empty when it has no ``/metrics``
    copies: dict[str, CopyCounts]  # what it copied between tiers, by kind; empty when it does not tell
    notes: list[str]  # what the server did not tell, in words
    num_differing: int  # prompts that are of another length to the server than to the endless cache


async def measure(
    connection: ConnectionOptions, load: CacheLoadOptions, limits: LimitOptions, progress: Begin
) -> CacheOutcome:
    """Sends a load and replays it through an endless cache. Raises HiserveError."""
    _check(connection, load, limits)
    backend = connection.backend or "openai"
    ignore_eos = load.load != "agent-sessions" if connection.ignore_eos is None else connection.ignore_eos
    async with connected(connection, backend, ignore_eos=ignore_eos, has_ids=True) as server:
        page_size = load.tokens_per_page or server.target.page_size
        if page_size is None:
            raise ConfigError(
                "the server does not tell its page size. Give --tokens-per-page.", param="tokens_per_page"
            )
        load = filled(load, device=server.target.device, max_model_len=server.target.max_model_len)
        encoder = partial(make_encoder, server.pool, server.target, server.tokenizer)
        requests = await build(load, server.target, encoder, limits.seed)
        await warm_up(server, requests.workload, limits)
        before, caches_before = await scrape(server.pool), await read_caches(server.pool)
        sender = _Sender(server, requests, load.num_tenants)
        run = await _drive(requests, sender.send, load, limits, progress)
        after, caches_after = await scrape(server.pool), await read_caches(server.pool)
    notes = [] if after else ["/metrics gave nothing; where there are API keys, the admin key reads it"]
    return CacheOutcome(
        outcome=server.outcome(requests.workload, run, [load, limits]),
        page_size=page_size,
        held=endless_cache([sender.visit(sample) for sample in run.samples], page_size),
        counters=increases(before, after),
        copies=_copied(caches_before, caches_after, notes),
        notes=notes,
        num_differing=sum(sample.num_prompt not in (-1, sender.sent(sample).size) for sample in run.samples),
    )


def _copied(before: CacheStatsReply | str, after: CacheStatsReply | str, notes: list[str]) -> dict[str, CopyCounts]:
    """Returns the copies between two readings; without one of them, none, and a note with the reason."""
    if isinstance(before, CacheStatsReply) and isinstance(after, CacheStatsReply):
        return copied(before, after)
    notes.append(after if isinstance(after, str) else str(before))
    return {}


class _Sender:
    """Sends the requests of a run, those of each tenant under its salt, and remembers their tokens."""

    def __init__(self, server: ServerUnderTest, requests: Requests, num_tenants: int) -> None:
        self._salts = [f"tenant-{index}" for index in range(num_tenants)] if num_tenants > 1 else [""]
        self._clients = [server.client.asking_for(cache_salt=salt) for salt in self._salts]
        self._encoded = requests.encoded
        self._sent: dict[tuple[int, int], Int32Array] = {}

    async def send(self, prompt: Prompt, max_tokens: int, sample: Sample) -> None:
        assert not isinstance(prompt, list), "no load has messages"
        ids = self._encoded[prompt] if isinstance(prompt, str) else prompt
        self._sent[sample.session, sample.turn] = ids
        await self._clients[self._tenant(sample)].send(prompt, max_tokens, sample)

    def sent(self, sample: Sample) -> Int32Array:
        return self._sent[sample.session, sample.turn]

    def visit(self, sample: Sample) -> Visit:
        """Returns a request as a cache sees it; one that failed never ended."""
        return Visit(
            prompt=self.sent(sample),
            output=np.array(sample.output_ids, dtype=np.int32),
            begin_s=sample.begin_s,
            end_s=math.inf if sample.error else sample.end_s,
            namespace=self._salts[self._tenant(sample)],
        )

    def _tenant(self, sample: Sample) -> int:
        return sample.session % len(self._clients)


async def _drive(requests: Requests, send: Send, load: CacheLoadOptions, limits: LimitOptions, progress: Begin) -> Run:
    workload = requests.workload
    on_done = SoFar(progress(workload.num_turns)).add
    if load.load == "multi-turn":
        return await drive_in_groups(workload, send, group_size=load.group_size, on_done=on_done)
    starts = [0.0] * len(workload.sessions)
    return await drive(workload, send, starts=starts, max_concurrency=limits.max_concurrency, on_done=on_done)


def _check(connection: ConnectionOptions, load: CacheLoadOptions, limits: LimitOptions) -> None:
    if connection.backend == "openai-chat":
        raise ConfigError(
            "chat completions do not tell which tokens a prompt became. Choose --backend openai or generate.",
            param="backend",
        )
    if load.load == "multi-turn" and limits.max_concurrency is not None:
        raise ConfigError(
            "--max-concurrency has no use for multi-turn: its conversations are sent in groups. Set --group-size.",
            param="max_concurrency",
        )
