"""Time to first token of a second turn, served from the prefix cache, against the same prompt uncached.

Usage: ``python benchmarks/second_turn.py``. Over HTTP on ``hiserve serve`` with its defaults.
Bar: at about 2,000 prompt tokens, cached <= 0.2 x uncached.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import RESULTS, SERVER, Record, judge
from benchmarks.served import serving
from hiserve.bench.load_client import FINAL_USAGE, Client
from hiserve.bench.online import ServerUnderTest, connected
from hiserve.bench.options import ConnectionOptions
from hiserve.bench.summary import ttft_s
from hiserve.bench.target import flush
from hiserve.bench.workload import Sample

STORY = "The customer asked for a small latte with oat milk and then changed the order to a large one. "
NUM_SENTENCES = 88  # about 2,000 tokens
ROUNDS = 9
BAR = 0.2


async def ask(client: Client, messages: list[dict[str, str]]) -> tuple[float, Sample]:
    """Streams one reply; returns milliseconds to its first text, and all of it."""
    sample = Sample()
    await client.send(messages, 16, sample)
    first_s = ttft_s(sample)
    assert first_s is not None and not sample.error, f"{sample.error}: {sample.detail}"
    return first_s * 1e3, sample


async def round_of(server: ServerUnderTest, client: Client, index: int) -> dict[str, Any]:
    """One conversation of two turns, its second turn cached, then the same prompt after a flush."""
    messages = [{"role": "user", "content": f"Note {index}. " + STORY * NUM_SENTENCES + "What did they order?"}]
    first_ms, said = await ask(client, messages)
    messages += [{"role": "assistant", "content": "".join(said.chunk_texts)}]
    messages += [{"role": "user", "content": "And what else?"}]
    cached_ms, cached = await ask(client, messages)
    await flush(server.pool)
    uncached_ms, uncached = await ask(client, messages)
    assert uncached.num_cached == 0
    await flush(server.pool)
    return {
        "prompt_tokens": cached.num_prompt,
        "cached_tokens": cached.num_cached,
        "first_turn_ms": round(first_ms, 2),
        "second_turn_ms": round(cached_ms, 2),
        "second_turn_uncached_ms": round(uncached_ms, 2),
    }


async def measure(url: str) -> list[dict[str, Any]]:
    async with connected(
        ConnectionOptions(url=url, temperature=0.7, timeout=120), "openai-chat", ignore_eos=False
    ) as server:
        client = server.client.asking_for(seed=1, usage=FINAL_USAGE)
        return [await round_of(server, client, index) for index in range(ROUNDS)]


def main() -> int:
    with serving() as server:
        rounds = asyncio.run(measure(server.url))
    cached = statistics.median(each["second_turn_ms"] for each in rounds)
    uncached = statistics.median(each["second_turn_uncached_ms"] for each in rounds)
    paths = (*SERVER, "hiserve/bench", "benchmarks/second_turn.py")
    record = Record(RESULTS / "second_turn.json", "python benchmarks/second_turn.py", *paths)
    record |= {
        "second_turn_ms": cached,
        "second_turn_uncached_ms": uncached,
        "ratio": round(cached / uncached, 4),
        "bar": BAR,
        "rounds": rounds,
    }
    record.save()
    return int(
        bool(judge({"cached, ms": cached, "uncached, ms": uncached, "ratio": cached / uncached}, most={"ratio": BAR}))
    )


if __name__ == "__main__":
    sys.exit(main())
