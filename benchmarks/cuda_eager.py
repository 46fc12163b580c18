"""The engine on a CUDA device, eager: the GPU tests, then a live server under chat and load.

Usage: ``python benchmarks/cuda_eager.py OUT.json COMMIT``. Not a speed record: runners with
graphs and fused kernels are a later step. It shows that the same server answers on a GPU, and decodes plainly:
``benchmarks/gpu/spec.py`` is about drafts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measured import SERVER
from benchmarks.record import Record
from benchmarks.served import serving
from hiserve.bench.load import drive
from hiserve.bench.load_client import Client
from hiserve.bench.online import connected
from hiserve.bench.options import ConnectionOptions
from hiserve.bench.summary import summarize, ttft_s
from hiserve.bench.workload import Prompt, Sample, Turn, Workload
from hiserve.core.machine import probe

QUESTIONS = (
    "Hi, I would like to find a place to eat in San Jose.",
    "Italian food please, and not too expensive.",
    "That sounds good. Please book a table for 2 people at 7 pm.",
    "Yes, that is right.",
)
MAX_TOKENS = 64


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


async def chat(client: Client) -> list[dict[str, Any]]:
    """A conversation; later turns come from the cache."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        sample = Sample()
        await client.send(messages, MAX_TOKENS, sample)
        assert not sample.error, f"{sample.error}: {sample.detail}"
        text = "".join(sample.chunk_texts)
        turns.append(
            {
                "text": text,
                "ttft_ms": round((ttft_s(sample) or 0.0) * 1e3, 2),
                "total_s": round(sample.end_s - sample.begin_s, 3),
                "completion_tokens": sample.num_output,
                "prompt_tokens": sample.num_prompt,
                "cached_tokens": sample.num_cached,
            }
        )
        messages.append({"role": "assistant", "content": text})
    return turns


async def load(client: Client, streams: int) -> dict[str, Any]:
    """Concurrent streams; returns the token rate over all."""

    async def send(prompt: Prompt, max_tokens: int, sample: Sample) -> None:
        await client.asking_for(temperature=0.8, seed=sample.session).send(prompt, max_tokens, sample)

    asked = ([{"role": "user", "content": f"{QUESTIONS[i % 4]} ({i})"}] for i in range(streams))
    sessions = [[Turn(prompt=messages, max_tokens=MAX_TOKENS)] for messages in asked]
    run = await drive(Workload(name="questions", sessions=sessions), send, starts=[0.0] * streams)
    found = summarize(run)
    assert not found.errors, found.errors
    rate, wall_s = round(found.output_tokens_per_s, 1), round(found.duration_s, 3)
    return {"streams": streams, "tokens": found.num_output, "wall_s": wall_s, "tokens_per_s": rate}


async def measure(url: str) -> dict[str, Any]:
    """Chats, loads, and reads the counters back."""
    async with connected(ConnectionOptions(url=url, timeout=120), "openai-chat", ignore_eos=False) as server:
        turns = await chat(server.client)
        loads = [await load(server.client, streams) for streams in (1, 32, 128)]
        _, info = await server.pool.ask("GET", "/server_info")
        _, flushed = await server.pool.ask("POST", "/flush_cache")
    return {"turns": turns, "loads": loads, "server_info": info, "flushed": flushed}


def main() -> int:
    """Writes the result file; returns 1 if a GPU test failed."""
    out, commit = Path(sys.argv[1]), sys.argv[2]
    num_gpus = min(2, len(probe().cuda_memory_bytes))
    command = "python benchmarks/cuda_eager.py OUT.json COMMIT"
    result = Record(out, command, *SERVER, at_commit=commit, num_gpus=num_gpus)
    result |= {"tests": gpu_tests(), "servers": []}
    two = [("--replicas", "2", "--kv-pages", "4096")] if num_gpus == 2 else []  # each has a device of its own
    for flags in ((), ("--dtype", "float32", "--overlap", "0"), *two):
        with serving("--device", "cuda", "--spec", "off", *flags) as live:
            server = {"flags": list(flags), **asyncio.run(measure(live.url))}
        result["servers"].append(server | {"exit_status": live.process.returncode})
        result.save()
        print(flags, [(t["ttft_ms"], t["cached_tokens"], t["prompt_tokens"]) for t in server["turns"]], server["loads"])
    return 1 if result["tests"]["status"] else 0


if __name__ == "__main__":
    sys.exit(main())
