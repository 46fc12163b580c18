"""CPU time of the API process for a streamed token: replies read by their format, other protocols, traces, each against without.

Usage: ``python -m benchmarks.api_process OUT.json COMMIT [--cpu | --tiny] [--rounds N]``. 32 streams at once over HTTP, in turns, so that
other load on the machine counts for all; no drafts, so that each token is an event of its own. Three servers run side by side:
``--reply-format none``, ``hermes``, and ``hermes`` with ``--otel-endpoint``. ``--cpu`` takes hiserve-nano, otherwise it is a shape of random
weights on a CUDA device. A ratio is the CPU time without over that with, so that a server whose API process is the limit has as much of its
throughput; the output tokens per second of each round are told too. ``--tiny`` is a test of this file.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.record import SERVER, Record, gpu_parser, judge, medians
from benchmarks.served import Server, serving_shape, thread_cpu_s
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO, find_model
from tests.helpers.collector import sink

SHAPE = "qwen3-0.6b"
SETTINGS: dict[str, Any] = {
    "spec": "off",
    "host_cache_gib": 0,
    "max_running_requests": 32,
    "max_model_len": 1024,
    "kv_pages": 2200,
}
ON_CPU: dict[str, Any] = {"model": NANO, "device": "cpu", "cpu_threads": 1}
ON_GPU: dict[str, Any] = {"shape": SHAPE, "load_format": "dummy", "device": "cuda"}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
# Which way is without, which is with, and the bar of their ratio.
BARS = {
    "reader on / off": ("text", "chat", 0.97),
    "messages / chat": ("chat", "messages", 0.95),
    "responses / chat": ("chat", "responses", 0.95),
    "traces on / off": ("chat", "traced", 0.99),
}


class Way(NamedTuple):
    """A server, and the requests to it."""

    server: str
    path: str


WAYS = {
    "text": Way("text", "/v1/chat/completions"),
    "chat": Way("read", "/v1/chat/completions"),
    "messages": Way("read", "/v1/messages"),
    "responses": Way("read", "/v1/responses"),
    "traced": Way("traced", "/v1/chat/completions"),
}


def body_of(path: str, number: int, num_tokens: int, end_token: int) -> dict[str, Any]:
    """Returns the same request in the protocol of a path: an end token is never drawn."""
    turns = [{"role": "user", "content": f"Tell me about town {number}."}]
    function = {"name": "find", "parameters": PARAMETERS}
    common = {"temperature": 0.8, "seed": number, "stream": True, "logit_bias": {str(end_token): -100}}
    if path.endswith("messages"):
        tool = {"name": "find", "input_schema": PARAMETERS}
        return common | {"messages": turns, "tools": [tool], "max_tokens": num_tokens}
    if path.endswith("responses"):
        return common | {"input": turns, "tools": [{"type": "function", **function}], "max_output_tokens": num_tokens}
    tools = [{"type": "function", "function": function}]
    options = {"stream_options": {"include_usage": True}, "max_tokens": num_tokens}
    return common | options | {"messages": turns, "tools": tools}


def generated(reply: bytes) -> int:
    """Returns the output tokens that the last event with a usage counts."""
    events = [json.loads(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: {")]
    usages = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events[-3:]]
    usage = next((each for each in reversed(usages) if each), None)
    assert usage is not None, reply[-400:]
    return int(usage.get("completion_tokens", usage.get("output_tokens")))


async def ask(url: str, path: str, body: bytes) -> int:
    """Streams one reply; returns its tokens."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    reply = await reader.read()
    writer.close()
    return generated(reply)


async def round_of(server: Server, path: str, num_streams: int, num_tokens: int, end_token: int) -> dict[str, float]:
    """Returns microseconds of CPU of the API process for a token of all streams, and tokens per second."""
    bodies = [json.dumps(body_of(path, n, num_tokens, end_token)).encode() for n in range(num_streams)]
    begin, used_s = time.perf_counter(), thread_cpu_s(server.process.pid)
    counts = await asyncio.gather(*[ask(server.url, path, body) for body in bodies])
    assert counts == [num_tokens] * num_streams, counts
    used_s, took_s = thread_cpu_s(server.process.pid) - used_s, time.perf_counter() - begin
    return {"us_of_a_token": 1e6 * used_s / sum(counts), "tokens_per_s": sum(counts) / took_s}


def measure(
    settings: dict[str, Any], vocab_size: int, num_streams: int, num_tokens: int, num_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the figures of each way, round by round; a first one, which warms the servers up, does not count."""
    end_token = json.loads((find_model(NANO) / "config.json").read_text())["eos_token_id"]
    found = {way: {"us_of_a_token": list[float](), "tokens_per_s": list[float]()} for way in WAYS}
    with ExitStack() as stack:
        formats = {"text": {"reply_format": "none"}, "read": {"reply_format": "hermes"}}
        formats["traced"] = formats["read"] | {"otel_endpoint": stack.enter_context(sink()).url}
        servers = {
            name: stack.enter_context(serving_shape(settings | given, vocab_size)) for name, given in formats.items()
        }
        for index in range(1 + num_rounds):
            for name in list(WAYS)[:: 1 if index % 2 else -1]:  # no way is always after the same one
                way = WAYS[name]
                one = asyncio.run(round_of(servers[way.server], way.path, num_streams, num_tokens, end_token))
                for figure, value in one.items() if index else ():
                    found[name][figure].append(round(value, 2))
            if index:
                print({name: each["us_of_a_token"][-1] for name, each in found.items()}, flush=True)
    return found


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    is_small = given.cpu or given.tiny
    settings = SETTINGS | (ON_CPU if is_small else ON_GPU)
    num_streams, num_tokens = (2, 8) if given.tiny else (32, 192)
    vocab_size = SHAPES[SHAPE]["vocab_size"]
    found = measure(settings, vocab_size, num_streams, num_tokens, 1 if given.tiny else given.rounds)
    used = {way: each["us_of_a_token"] for way, each in found.items()}
    ratios = {
        name: [off / on for off, on in zip(used[without], used[with_], strict=True)]
        for name, (without, with_, _) in BARS.items()
    }
    median, least = medians(ratios, 4), {name: bar for name, (_, _, bar) in BARS.items()}
    command = f"python -m benchmarks.api_process OUT.json COMMIT{' --cpu' if is_small else ''}"
    record = Record(
        given.out, command, *SERVER, "benchmarks/api_process.py", at_commit=given.commit, num_gpus=int(not is_small)
    )
    record |= {"streams": num_streams, "tokens": num_tokens, "bars": least, "ratios": median}
    record |= {"ratios_of_rounds": {name: [round(each, 4) for each in values] for name, values in ratios.items()}}
    record |= {"samples": found, "median_us": {way: statistics.median(values) for way, values in used.items()}}
    record.save()
    return int(bool(judge(median, least=least)) and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
