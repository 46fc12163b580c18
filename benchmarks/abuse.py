"""The wait of a caller for its next token while others send bodies of the largest size.

Usage: ``python -m benchmarks.abuse [--seconds N] [--cores N] [--only NAME ...] [--out FILE] [--commit COMMIT]``. A server of
hiserve-nano takes bodies of up to 16 MiB. One caller's streams are read without a pause; their worst gap is taken calm, then
under each attack, in turns. A process of its own sends the attack: ten bodies at a time, again and again; or 20 grammars at once, whose masks take longer than allowed.
Bars: the worst gap under an attack is at most 3 x the calm one before it, under grammars 2 x, and at most 250 ms longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.record import RESULTS, Record
from benchmarks.served import cpu_s, serving
from hiserve.bench.http import Pool
from hiserve.bench.load_client import NO_USAGE, Client
from hiserve.bench.online import connected
from hiserve.bench.options import ConnectionOptions
from hiserve.bench.soak.soak_run import still_open
from hiserve.bench.workload import Sample

MAX_BODY = 16 * 2**20
NUM_SENDERS = 10
IDLE_S = 120.0
NUM_GRAMMARS = 20
GRAMMARS = "grammars"
BAR_RATIO, BAR_GRAMMARS, BAR_EXTRA_S = 3.0, 2.0, 0.25
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PART = '{"type":"text","text":"x"}'
PROMPT, MAX_TOKENS = "Once upon a time", 400


def filled(start: str, entry: Callable[[int], str], end: str, num_bytes: int = 12_900_000) -> list[bytes]:
    """Returns bodies of about so many bytes each, of entries with commas between them."""
    count = num_bytes // (len(entry(100_000)) + 1)
    return [(start + ",".join(map(entry, range(count))) + end).encode()] * NUM_SENDERS


def grammars() -> list[bytes]:
    """Returns bodies with a grammar each that takes too much work."""
    schemas = [{"type": "integer", "multipleOf": 1_234_567 + number} for number in range(NUM_GRAMMARS)]
    return [json.dumps({"prompt": "Hello", "max_tokens": 8, "guided_json": schema}).encode() for schema in schemas]


ATTACKS: dict[str, tuple[str, Callable[[], list[bytes]]]] = {
    "biases": (TEXT, lambda: filled('{"prompt":"x","logit_bias":{', lambda i: f'"{i}":1.5', "}}")),
    "token ids": (TEXT, lambda: filled('{"prompt":[', lambda i: "5", "]}", 10_000_000)),
    "nested lists": (TEXT, lambda: filled('{"prompt":[', lambda i: "[[]]", "]}")),
    "parts": (CHAT, lambda: filled('{"messages":[{"role":"user","content":[', lambda i: PART, "]}]}", 8_600_000)),
    "messages": (CHAT, lambda: filled('{"messages":[', lambda i: '{"role":"user","content":"Hi"}', "]}")),
    "text to cut": (TEXT, lambda: filled('{"truncate_prompt_tokens":5,"max_tokens":1,"prompt":"', lambda i: "many words", '"}')),
    "text": (TEXT, lambda: filled('{"max_tokens":1,"prompt":"', lambda i: "many words", '"}')),
    GRAMMARS: (TEXT, grammars),
}  # fmt: skip


async def gaps(client: Client, seconds: float) -> list[float]:
    """Reads one stream after the other; returns the seconds between any two pieces of text, and to each first one.

    The last stream is read to its end, so that no gap is cut off.
    """
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sample = Sample()
        await client.send(PROMPT, MAX_TOKENS, sample)
        assert not sample.error, f"{sample.error}: {sample.detail}"
        found += np.diff([sample.begin_s, *sample.chunk_s]).tolist()
    return found


async def attack(url: str, name: str) -> None:
    """Sends bodies until it is ended, each grammar once; prints the status of each answer."""
    path, build = ATTACKS[name]
    bodies = build()
    print("ready", flush=True)

    async def send(body: bytes) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    print((await http.post(path, content=body)).status_code, flush=True)
                if name == GRAMMARS:
                    await asyncio.Event().wait()

    await asyncio.gather(*map(send, bodies))


async def under(client: Client, url: str, name: str, seconds: float) -> tuple[list[float], dict[str, int]]:
    """Returns the gaps under an attack, and the statuses of its answers."""
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.abuse", "--attack", name, "--url", url), stdout=asyncio.subprocess.PIPE
    )
    assert sender.stdout is not None
    await sender.stdout.readline()
    found = await gaps(client, seconds)
    sender.kill()
    statuses = (await sender.stdout.read()).decode().split()
    await sender.wait()
    return found, {status: statuses.count(status) for status in sorted(set(statuses))}


async def measure(seconds: float, names: list[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with serving("--max-request-bytes", str(MAX_BODY), "--cpu-threads", "1") as live:
        async with connected(ConnectionOptions(url=live.url, timeout=300), "openai", ignore_eos=True) as server:
            client = server.client.asking_for(usage=NO_USAGE)
            await gaps(client, 3)
            for name in names:
                calm = await gaps(client, seconds)
                before, begin = cpu_s(live.process.pid), time.perf_counter()
                attacked, statuses = await under(client, live.url, name, seconds)
                api_cpu_share = (cpu_s(live.process.pid) - before) / (time.perf_counter() - begin)
                figures[name] = {
                    "worst_gap_calm_ms": round(1e3 * max(calm), 1),
                    "worst_gap_attacked_ms": round(1e3 * max(attacked), 1),
                    "ratio": round(max(attacked) / max(calm), 2),
                    "median_gap_calm_ms": round(1e3 * sorted(calm)[len(calm) // 2], 2),
                    "median_gap_attacked_ms": round(1e3 * sorted(attacked)[len(attacked) // 2], 2),
                    "api_cpu_share": round(api_cpu_share, 2),
                    "answers": statuses,
                }
                print(name, json.dumps(figures[name]), flush=True)
                await until_idle(server.pool)
    return figures


async def until_idle(pool: Pool) -> None:
    async with asyncio.timeout(IDLE_S):
        while still_open((await pool.ask("GET", "/server_info"))[1]):
            await asyncio.sleep(0.05)


def is_held(name: str, figure: dict[str, Any]) -> bool:
    calm, attacked = figure["worst_gap_calm_ms"] / 1e3, figure["worst_gap_attacked_ms"] / 1e3
    most = BAR_GRAMMARS if name == GRAMMARS else BAR_RATIO
    return bool(attacked <= most * calm and attacked <= calm + BAR_EXTRA_S)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cores", type=int, default=2, help="Of server and attacker together.")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--out", type=Path, default=RESULTS / "abuse.json")
    parser.add_argument("--commit", help="that is measured; needed where there is no checkout to ask")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        asyncio.run(attack(given.url, given.attack))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    load = os.getloadavg()[0]
    figures = asyncio.run(measure(given.seconds, given.only))
    paths = ("hiserve/server", "hiserve/text", "benchmarks/abuse.py")
    result = Record(given.out, "python -m benchmarks.abuse", *paths, at_commit=given.commit)
    result |= {
        "cores": given.cores,
        "load_before": round(load, 2),
        "seconds": given.seconds,
        "senders": NUM_SENDERS,
        "attacks": figures,
        "bar": {"ratio": BAR_RATIO, "ratio_of_grammars": BAR_GRAMMARS, "extra_s": BAR_EXTRA_S},
        "held": {name: is_held(name, figure) for name, figure in figures.items()},
    }
    result.save()
    print(f"{'attack':<16}{'calm ms':>10}{'attacked':>10}{'ratio':>8}")
    for name, figure in figures.items():
        row = f"{figure['worst_gap_calm_ms']:>10}{figure['worst_gap_attacked_ms']:>10}{figure['ratio']:>8}"
        print(f"{name:<16}{row}{'' if result['held'][name] else '  MISSED'}")
    return int(not all(result["held"].values()))


if __name__ == "__main__":
    sys.exit(main())
