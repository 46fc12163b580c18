"""The engine on a CUDA device, eager: the GPU tests, then a live server under chat and load.

Usage: ``python benchmarks/cuda_eager.py OUT.json COMMIT``. Not a speed record: runners with
graphs and fused kernels are a later step. It shows that the same server answers on a GPU, and decodes plainly:
``benchmarks/gpu/spec.py`` is about drafts.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measured import SERVER
from benchmarks.record import about
from hiserve.core.machine import probe

QUESTIONS = (
    "Hi, I would like to find a place to eat in San Jose.",
    "Italian food please, and not too expensive.",
    "That sounds good. Please book a table for 2 people at 7 pm.",
    "Yes, that is right.",
)


def gpu_tests() -> dict[str, Any]:
    """Runs ``pytest -m gpu``; returns its summary."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "--timeout", "400"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-3000:], done.stderr[-1000:])
    return {"status": done.returncode, "summary": done.stdout.strip().splitlines()[-1]}


async def turn(client: httpx.AsyncClient, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """Streams one reply and returns text, time to first token, rate and cached tokens."""
    body = {
        "messages": messages, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64,
        "temperature": 0, **fields,
    }  # fmt: skip
    text, usage, first = "", {}, None
    start = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    text += piece
    total = time.perf_counter() - start
    return {
        "text": text,
        "ttft_ms": round(((first or start) - start) * 1e3, 2),
        "total_s": round(total, 3),
        "completion_tokens": usage["completion_tokens"],
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def chat(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """A conversation; later turns come from the cache."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        turns.append(await turn(client, messages))
        messages.append({"role": "assistant", "content": turns[-1]["text"]})
    return turns


async def load(client: httpx.AsyncClient, streams: int) -> dict[str, Any]:
    """Concurrent streams; returns the token rate over all."""
    start = time.perf_counter()
    done = await asyncio.gather(
        *(
            turn(client, [{"role": "user", "content": f"{QUESTIONS[i % 4]} ({i})"}], temperature=0.8, seed=i)
            for i in range(streams)
        )
    )
    wall = time.perf_counter() - start
    tokens = sum(each["completion_tokens"] for each in done)
    return {"streams": streams, "tokens": tokens, "wall_s": round(wall, 3), "tokens_per_s": round(tokens / wall, 1)}


async def measure(url: str) -> dict[str, Any]:
    """Chats, loads, and reads the counters back."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)
        turns = await chat(client)
        loads = [await load(client, streams) for streams in (1, 32, 128)]
        info = (await client.get("/server_info")).json()
        flushed = (await client.post("/flush_cache")).json()
    return {"turns": turns, "loads": loads, "server_info": info, "flushed": flushed}


def serve_and_measure(*flags: str) -> dict[str, Any]:
    """Starts a server on the device and measures it."""
    command = [
        sys.executable,
        "-m",
        "hiserve.cli",
        "serve",
        "--device",
        "cuda",
        "--port",
        "0",
        "--log-level",
        "warning",
        "--spec",
        "off",
        *flags,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    assert server.stdout is not None
    try:
        url = next(found.group() for line in server.stdout if (found := re.search(r"http://\S+", line)))
        result = asyncio.run(measure(url))
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=60)
    return {"flags": list(flags), "exit_status": status} | result


def main() -> int:
    """Writes the result file; returns 1 if a GPU test failed."""
    out, commit = Path(sys.argv[1]), sys.argv[2]
    num_gpus = min(2, len(probe().cuda_memory_bytes))
    header = about("python benchmarks/cuda_eager.py OUT.json COMMIT", *SERVER, at_commit=commit, num_gpus=num_gpus)
    result = header | {"tests": gpu_tests(), "servers": []}
    two = [("--replicas", "2", "--kv-pages", "4096")] if num_gpus == 2 else []  # each has a device of its own
    for flags in ((), ("--dtype", "float32", "--overlap", "0"), *two):
        result["servers"].append(serve_and_measure(*flags))
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        server = result["servers"][-1]
        print(flags, [(t["ttft_ms"], t["cached_tokens"], t["prompt_tokens"]) for t in server["turns"]], server["loads"])
    return 1 if result["tests"]["status"] else 0


if __name__ == "__main__":
    sys.exit(main())
