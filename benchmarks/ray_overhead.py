"""Costs of Ray Serve around an engine, and the death of one of two engines behind the gateway; hiserve-nano on a CPU.

Usage: ``python -m benchmarks.ray_overhead OUT.json COMMIT [--rounds N] [--tiny]``, with the extra ray. A plain server, an engine
behind Serve's proxy (``direct``) and one behind the gateway are all there, and are asked in turns for the same streams, so that other
load on the machine counts for all. CPU is that of the processes between client and scheduler: the API, proxies, gateways. Then
one of two engines is killed with SIGKILL while all streams run: each client must get the text that it gets undisturbed.
``--tiny`` is a test of this file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.record import SERVER, Record, gpu_parser, judge, medians
from benchmarks.served import cpu_s, serving
from tests.helpers.valkey import free_port

SETTINGS = {"cpu_threads": "1", "spec": "off", "host_cache_gib": "0", "seal_key": "one secret", "log_level": "warning"}
WAYS = ("plain", "direct", "gateway")
# Throughput over that of the plain server, milliseconds to the first token over its, and of the gateway ms of CPU a chunk.
LEAST = {"direct throughput": 0.97, "gateway throughput": 0.9}
MOST = {"direct ttft more ms": 2.0, "gateway ttft more ms": 10.0, "gateway cpu ms a chunk": 0.8, "largest gap s": 1.0}
CLIENTS = "http://127.0.0.1"


class Reply(NamedTuple):
    """A stream as its client saw it."""

    ttft_s: float
    largest_gap_s: float
    num_events: int
    text: str


async def ask(url: str, number: int, num_tokens: int, on_event: Callable[[], None] = lambda: None) -> Reply:
    """Streams one reply."""
    body = {"prompt": f"Tell me about town {number}.", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    content, address = json.dumps(body).encode(), urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nx-request-id: bench-{number}\r\n"
    writer.write(f"{head}content-type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    times, texts = [time.perf_counter()], list[str]()
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "choices" in event, line
            times.append(time.perf_counter())
            texts.append(event["choices"][0]["text"])
            on_event()
        elif line.startswith(b"data: [DONE]"):
            break
    else:
        raise AssertionError(f"stream {number} ended after {len(texts)} events")
    writer.close()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
    return Reply(times[1] - times[0], max(gaps), len(texts), "".join(texts))


def processes(*names: bytes) -> dict[int, float]:
    """Returns the CPU time in s of the processes whose command begins with one of these."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")[0]
            if command.rpartition(b"/")[2].startswith(names):
                found[int(folder.name)] = cpu_s(int(folder.name))
        except OSError:
            continue
    return found


async def round_of(url: str, between: Callable[[], float], num_streams: int, num_tokens: int) -> dict[str, float]:
    """Returns the figures of one way; ``between`` returns the CPU of the processes between client and scheduler."""
    before_s, begin = between(), time.perf_counter()
    replies = await asyncio.gather(*[ask(url, number, num_tokens) for number in range(num_streams)])
    took_s, used_s = time.perf_counter() - begin, between() - before_s
    num_events = sum(reply.num_events for reply in replies)
    return {
        "tokens_per_s": num_streams * num_tokens / took_s,
        "ttft_ms": 1e3 * statistics.median(reply.ttft_s for reply in replies),
        "cpu_ms_a_chunk": 1e3 * used_s / num_events,
    }


@contextmanager
def cluster(port: int) -> Iterator[Any]:
    """Runs Ray with Serve at a port of loopback; returns the function that runs an application."""
    import ray  # noqa: PLC0415 - only this file needs the extra
    from ray import serve  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="r") as folder:
        # Else Ray gives its processes, and so the engines, a niceness of 15.
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _system_config={"worker_niceness": 0},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            yield serve.run
        finally:
            serve.shutdown()
            ray.shutdown()


def overheads(num_rounds: int, num_streams: int, num_tokens: int) -> list[dict[str, dict[str, float]]]:
    """Returns the rounds; a first one, which warms up, does not count."""
    from hiserve.ray_app import direct, gateway  # noqa: PLC0415

    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    port, rounds = free_port(), []
    with serving(*flags) as plain, cluster(port) as run:
        run(direct({"engines": "1"} | SETTINGS), name="d", route_prefix="/d")
        run(gateway({"engines": "1"} | SETTINGS), name="g", route_prefix="/g")
        proxies = (b"ray::ProxyActor", b"ray::HAProxy", b"haproxy")
        used: dict[str, Callable[[], float]] = {
            "plain": lambda: cpu_s(plain.process.pid),
            "direct": lambda: sum(processes(b"ray::ServeReplica:d:", *proxies).values()),
            "gateway": lambda: sum(processes(b"ray::ServeReplica:g:", *proxies).values()),
        }
        urls = {"plain": plain.url, "direct": f"{CLIENTS}:{port}/d", "gateway": f"{CLIENTS}:{port}/g"}
        for number in range(1 + num_rounds):
            order = [*WAYS[number % 3 :], *WAYS[: number % 3]]
            found = {way: asyncio.run(round_of(urls[way], used[way], num_streams, num_tokens)) for way in order}
            rounds.append({way: {name: round(it, 4) for name, it in found[way].items()} for way in WAYS})
            print(rounds[-1], flush=True)
    return rounds[1:]


def killed(num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Returns what the clients of two engines saw of the death of one, while all their streams ran."""
    from hiserve.ray_app import gateway  # noqa: PLC0415

    port = free_port()
    url = f"{CLIENTS}:{port}"
    engines: Sequence[bytes] = (b"ray::ServeReplica:g:engine",)

    async def all_of(kill_after: int | None) -> list[Reply]:
        seen = 0
        before = processes(*engines)

        def on_event() -> None:
            nonlocal seen
            seen += 1
            if seen == kill_after:
                now = processes(*engines)
                os.kill(max(now, key=lambda pid: now[pid] - before.get(pid, 0)), signal.SIGKILL)

        return await asyncio.gather(*[ask(url, number, num_tokens, on_event) for number in range(num_streams)])

    with cluster(port) as run:
        run(gateway({"engines": "2"} | SETTINGS), name="g", route_prefix="/")
        asyncio.run(all_of(None))
        calm = asyncio.run(all_of(None))
        broken = asyncio.run(all_of(num_streams * num_tokens // 3))
    return {
        "streams": num_streams,
        "equal": sum(one.text == other.text for one, other in zip(calm, broken, strict=True)),
        "largest_gap_s": round(max(reply.largest_gap_s for reply in broken), 3),
        "largest_gap_calm_s": round(max(reply.largest_gap_s for reply in calm), 3),
    }


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    num_streams, num_tokens = (2, 16) if given.tiny else (16, 128)
    command = "python -m benchmarks.ray_overhead OUT.json COMMIT"
    sources = (*SERVER, "hiserve/fleet", "hiserve/ray_app.py", "benchmarks/ray_overhead.py")
    record = Record(given.out, command, *sources, at_commit=given.commit)
    rounds = overheads(1 if given.tiny else given.rounds, num_streams, num_tokens)
    ratios = {
        f"{way} throughput": [each[way]["tokens_per_s"] / each["plain"]["tokens_per_s"] for each in rounds]
        for way in WAYS[1:]
    }
    more = {
        f"{way} ttft more ms": [each[way]["ttft_ms"] - each["plain"]["ttft_ms"] for each in rounds] for way in WAYS[1:]
    }
    cpu = {f"{way} cpu ms a chunk": [each[way]["cpu_ms_a_chunk"] for each in rounds] for way in WAYS}
    death = killed(num_streams, num_tokens)
    found = medians(ratios | more | cpu) | {"largest gap s": death["largest_gap_s"]}
    ha_proxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    record |= {"streams": num_streams, "tokens": num_tokens, "ha_proxy": ha_proxy, "figures": found, "rounds": rounds}
    record |= {"bars": LEAST | MOST, "death": death}
    record.save()
    assert death["equal"] == num_streams, death
    return int(bool(judge(found, least=LEAST, most=MOST)) and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
