"""One run that measures a server's cache: look at it, build, warm up, flush, read counters, send, read them again."""

from __future__ import annotations

import math
from functools import partial

import msgspec
import numpy as np

from hiserve.bench.cache_loads import Requests, build
from hiserve.bench.cache_summary import Held, Visit, endless_cache
from hiserve.bench.load import Begin, Send, SoFar, drive, drive_in_groups
from hiserve.bench.online import RunOutcome, ServerUnderTest, connected, warm_up
from hiserve.bench.options import CacheLoadOptions, ConnectionOptions, LimitOptions, filled
from hiserve.bench.scrape import CacheStatsReply, CopyCounts, Series, copied, increases, read_caches, scrape
from hiserve.bench.target import make_encoder
from hiserve.bench.workload import Prompt, Run, Sample
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError


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
    """Returns what was copied, or notes why that is not known."""
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
        """Returns what a cache sees of a request; one that failed never ended."""
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
