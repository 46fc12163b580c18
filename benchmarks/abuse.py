"""How long a caller waits for its next token while others send bodies that are as large as they may be.

Usage: ``python -m benchmarks.abuse [--seconds N] [--cores N]``. A server of hiserve-nano takes bodies of up to 16 MiB. One
caller's streams are read without a pause; their worst gap is taken calm, then under each attack, in turns. A process of its
own sends the attack: ten bodies at a time, again and again. Bar: the worst gap under an attack is at most 3 x the calm one
before it, and at most 250 ms longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.record import ROOT, about
from tests.e2e.live import serve

MAX_BODY = 16 * 2**20
NUM_SENDERS = 10
BAR_RATIO, BAR_EXTRA_S = 3.0, 0.25
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PART = '{"type":"text","text":"x"}'
STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}


def filled(start: str, entry: Callable[[int], str], end: str, num_bytes: int = 12_900_000) -> bytes:
    """Returns a body of about so many bytes, of entries with commas between them."""
    count = num_bytes // (len(entry(100_000)) + 1)
    return (start + ",".join(map(entry, range(count))) + end).encode()


ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "biases": (TEXT, lambda: filled('{"prompt":"x","logit_bias":{', lambda i: f'"{i}":1.5', "}}")),
    "token ids": (TEXT, lambda: filled('{"prompt":[', lambda i: "5", "]}", 10_000_000)),
    "nested lists": (TEXT, lambda: filled('{"prompt":[', lambda i: "[[]]", "]}")),
    "parts": (CHAT, lambda: filled('{"messages":[{"role":"user","content":[', lambda i: PART, "]}]}", 8_600_000)),
    "messages": (CHAT, lambda: filled('{"messages":[', lambda i: '{"role":"user","content":"Hi"}', "]}")),
    "text to cut": (TEXT, lambda: filled('{"truncate_prompt_tokens":5,"max_tokens":1,"prompt":"', lambda i: "many words", '"}')),
    "text": (TEXT, lambda: filled('{"max_tokens":1,"prompt":"', lambda i: "many words", '"}')),
}  # fmt: skip


async def gaps(url: str, seconds: float) -> list[float]:
    """Reads one stream after the other; returns the seconds between any two events, and to each first one."""
    found: list[float] = []
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        while time.monotonic() < end:
            last = time.monotonic()
            async with http.stream("POST", TEXT, json=STREAM) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        found.append(now - last)
                        last = now
                        if now > end:
                            break
    return found


async def attack(url: str, name: str) -> None:
    """Sends bodies until it is ended; prints how many were answered, with what status."""
    path, build = ATTACKS[name]
    body = build()
    print("ready", flush=True)

    async def send() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    print((await http.post(path, content=body)).status_code, flush=True)

    await asyncio.gather(*(send() for _ in range(NUM_SENDERS)))


async def under(url: str, name: str, seconds: float) -> tuple[list[float], dict[str, int]]:
    """Returns the gaps under an attack, and the statuses of its answers."""
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.abuse", "--attack", name, "--url", url), stdout=asyncio.subprocess.PIPE
    )
    assert sender.stdout is not None
    await sender.stdout.readline()
    found = await gaps(url, seconds)
    sender.kill()
    statuses = (await sender.stdout.read()).decode().split()
    await sender.wait()
    return found, {status: statuses.count(status) for status in sorted(set(statuses))}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(seconds: float) -> dict[str, Any]:
    """Returns the figures of every attack."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--max-request-bytes", str(MAX_BODY), "--cpu-threads", "1", "--log-level", "warning")
        with serve(Path(folder), *flags) as live:
            await gaps(live.url, 3)
            for name in ATTACKS:
                calm = await gaps(live.url, seconds)
                before = cpu_s(live.process.pid)
                attacked, statuses = await under(live.url, name, seconds)
                figures[name] = {
                    "worst_gap_calm_ms": round(1e3 * max(calm), 1),
                    "worst_gap_attacked_ms": round(1e3 * max(attacked), 1),
                    "ratio": round(max(attacked) / max(calm), 2),
                    "median_gap_calm_ms": round(1e3 * sorted(calm)[len(calm) // 2], 2),
                    "median_gap_attacked_ms": round(1e3 * sorted(attacked)[len(attacked) // 2], 2),
                    "api_cpu_share": round((cpu_s(live.process.pid) - before) / seconds, 2),
                    "answers": statuses,
                }
                print(name, json.dumps(figures[name]), flush=True)
                await asyncio.to_thread(live.wait_idle, 120)
    return figures


def is_held(figure: dict[str, Any]) -> bool:
    """Says whether an attack stays within the bar."""
    calm, attacked = figure["worst_gap_calm_ms"] / 1e3, figure["worst_gap_attacked_ms"] / 1e3
    return bool(attacked <= BAR_RATIO * calm and attacked <= calm + BAR_EXTRA_S)


def main() -> int:
    """Writes ``benchmarks/results/abuse.json``; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cores", type=int, default=2, help="Of server and attacker together.")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        asyncio.run(attack(given.url, given.attack))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    load = os.getloadavg()[0]
    figures = asyncio.run(measure(given.seconds))
    result = {
        **about("python -m benchmarks.abuse", "hiserve/server", "hiserve/text", "benchmarks/abuse.py"),
        "cores": given.cores,
        "load_before": round(load, 2),
        "seconds": given.seconds,
        "senders": NUM_SENDERS,
        "attacks": figures,
        "bar": {"ratio": BAR_RATIO, "extra_s": BAR_EXTRA_S},
        "held": {name: is_held(figure) for name, figure in figures.items()},
    }
    (ROOT / "benchmarks/results/abuse.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["held"]))
    return int(not all(result["held"].values()))


if __name__ == "__main__":
    sys.exit(main())
