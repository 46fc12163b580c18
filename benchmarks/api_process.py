"""CPU time of the API process for a streamed token: replies read by their format, other protocols, traces, each against without.

Usage: ``python -m benchmarks.api_process OUT.json COMMIT [--cpu | --tiny] [--rounds N]``. Each way of streaming has a server of its own with 32 streams
over HTTP, all at the same time, so that other load on the machine, and on its caches, counts for all; no drafts, so that each token is an event
of its own. The ways are chat with ``--reply-format none``, with ``hermes``, also with ``--otel-endpoint``, and the other protocols. ``--cpu``
takes hiserve-nano, otherwise it is a shape of random weights on a CUDA device. A ratio is the CPU time without over that with, so that a
server whose API process is the limit has as much of its throughput. ``--tiny`` is a test of this file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
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


CHAT = "/v1/chat/completions"
PATHS = {"text": CHAT, "chat": CHAT, "messages": "/v1/messages", "responses": "/v1/responses", "traced": CHAT}


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


async def used_by(server: Server, path: str, bodies: Sequence[bytes], num_tokens: int) -> float:
    """Returns microseconds of CPU of the API process for a token of all streams."""
    used_s = thread_cpu_s(server.process.pid)
    counts = await asyncio.gather(*[ask(server.url, path, body) for body in bodies])
    assert counts == [num_tokens] * len(bodies), counts
    return 1e6 * (thread_cpu_s(server.process.pid) - used_s) / sum(counts)


async def round_of(servers: dict[str, Server], num_streams: int, num_tokens: int, end_token: int) -> dict[str, float]:
    """Returns the figure of each way; they run at the same time."""
    bodies = {
        way: [json.dumps(body_of(path, number, num_tokens, end_token)).encode() for number in range(num_streams)]
        for way, path in PATHS.items()
    }
    used = await asyncio.gather(*[used_by(servers[way], PATHS[way], bodies[way], num_tokens) for way in PATHS])
    return {way: round(each, 2) for way, each in zip(PATHS, used, strict=True)}


def measure(
    settings: dict[str, Any], vocab_size: int, num_streams: int, num_tokens: int, num_rounds: int
) -> list[dict[str, float]]:
    """Returns the rounds; a first one, which warms the servers up, does not count."""
    end_token, rounds = json.loads((find_model(NANO) / "config.json").read_text())["eos_token_id"], []
    with ExitStack() as stack:
        own = {way: {"reply_format": "none" if way == "text" else "hermes"} for way in PATHS}
        own["traced"]["otel_endpoint"] = stack.enter_context(sink()).url
        servers = {way: stack.enter_context(serving_shape(settings | given, vocab_size)) for way, given in own.items()}
        for _ in range(1 + num_rounds):
            rounds.append(asyncio.run(round_of(servers, num_streams, num_tokens, end_token)))
            print(rounds[-1], flush=True)
    return rounds[1:]


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    is_small = given.cpu or given.tiny
    settings = SETTINGS | (ON_CPU if is_small else ON_GPU)
    num_streams, num_tokens = (2, 8) if given.tiny else (32, 128)
    vocab_size = SHAPES[SHAPE]["vocab_size"]
    rounds = measure(settings, vocab_size, num_streams, num_tokens, 1 if given.tiny else given.rounds)
    ratios = {name: [each[without] / each[with_] for each in rounds] for name, (without, with_, _) in BARS.items()}
    median, least = medians(ratios, 4), {name: bar for name, (_, _, bar) in BARS.items()}
    command = f"python -m benchmarks.api_process OUT.json COMMIT{' --cpu' if is_small else ''}"
    record = Record(
        given.out, command, *SERVER, "benchmarks/api_process.py", at_commit=given.commit, num_gpus=int(not is_small)
    )
    record |= {"streams": num_streams, "tokens": num_tokens, "bars": least, "ratios": median}
    record |= {"ratios_of_rounds": {name: [round(each, 4) for each in values] for name, values in ratios.items()}}
    record |= {"us_of_a_token": medians({way: [each[way] for each in rounds] for way in PATHS}, 1), "rounds": rounds}
    record.save()
    return int(bool(judge(median, least=least)) and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
