"""CPU time of the API process for a streamed token, replies read by their format against text.

Usage: ``python -m benchmarks.reader``. Over HTTP on ``hiserve serve`` with hiserve-nano, 32 streams at once. Two servers run side by
side, one with ``--reply-format hermes``, and take turns: other load on the machine counts for both. Bar: the CPU time without the
reader is 0.97 of that with it, so that a server whose API process is the limit has as much of its throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.record import RESULTS, SERVER, Record, judge
from benchmarks.served import Server, serving

NUM_STREAMS = 32
NUM_TOKENS = 256
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}  # fmt: skip
BAR = 0.97


def cpu_s(server: Server) -> float:
    """Returns the CPU time of the API process so far, in seconds."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def ask(url: str, number: int) -> int:
    """Streams one reply; returns its tokens."""
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Tell me about town {number}."}],
        "tools": [TOOL],
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body, address = json.dumps(asked).encode(), urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    reply = await reader.read()
    writer.close()
    last = [line for line in reply.split(b"\n") if line.startswith(b"data: {")][-1]
    return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])


async def round_of(server: Server) -> float:
    """Returns microseconds of CPU of the API process for a token of 32 streams."""
    begin = cpu_s(server)
    counts = await asyncio.gather(*[ask(server.url, number) for number in range(NUM_STREAMS)])
    assert counts == [NUM_TOKENS] * NUM_STREAMS, counts
    return (cpu_s(server) - begin) / sum(counts) * 1e6


async def measure(servers: dict[str, Server], num_rounds: int) -> list[dict[str, float]]:
    """Returns a round of each server at a time; the first, which warms them up, does not count."""
    rounds = [{name: await round_of(server) for name, server in servers.items()} for _ in range(1 + num_rounds)]
    return rounds[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="print and write nothing")
    options = parser.parse_args()
    with serving("--reply-format", "none") as text, serving("--reply-format", "hermes") as read:
        rounds = asyncio.run(measure({"text": text, "read": read}, options.rounds))
    ratio = statistics.median(each["text"] / each["read"] for each in rounds)
    found = {name: round(statistics.median(each[name] for each in rounds), 1) for name in ("text", "read")}
    print(found, f"ratio {ratio:.3f}", sorted(round(each["text"] / each["read"], 3) for each in rounds))
    if options.dry:
        return 0
    record = Record(RESULTS / "reader.json", "python -m benchmarks.reader", *SERVER, "benchmarks/reader.py")
    record |= {"us_of_a_token": found, "ratio": round(ratio, 4), "bar": BAR, "rounds": rounds}
    record.save()
    return int(bool(judge({"ratio": ratio}, least={"ratio": BAR})))


if __name__ == "__main__":
    sys.exit(main())
