"""Time to first token of a second turn, served from the prefix cache, against the same prompt uncached.

Usage: ``python benchmarks/second_turn.py``. Over HTTP on ``hiserve serve`` with its defaults.
Bar: at about 2,000 prompt tokens, cached <= 0.2 x uncached.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measured import SERVER
from benchmarks.record import ROOT, about

STORY = "The customer asked for a small latte with oat milk and then changed the order to a large one. "
NUM_SENTENCES = 88  # about 2,000 tokens
ROUNDS = 9
BAR = 0.2


def time_to_first_token(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, Any]]:
    """Streams one reply; returns milliseconds to the first text, the text and the usage."""
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 16}
    body |= {"temperature": 0.7, "seed": 1}
    text, usage, first = "", {}, 0.0
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    text += piece
    return (first - start) * 1e3, text, usage


def round_of(client: httpx.Client, index: int) -> dict[str, Any]:
    """One conversation of two turns, its second turn cached, then the same prompt after a flush."""
    messages = [{"role": "user", "content": f"Note {index}. " + STORY * NUM_SENTENCES + "What did they order?"}]
    first_ms, reply, _ = time_to_first_token(client, messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And what else?"}]
    cached_ms, _, usage = time_to_first_token(client, messages)
    client.post("/flush_cache").raise_for_status()
    uncached_ms, _, again = time_to_first_token(client, messages)
    assert again["prompt_tokens_details"]["cached_tokens"] == 0
    client.post("/flush_cache").raise_for_status()
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "first_turn_ms": round(first_ms, 2),
        "second_turn_ms": round(cached_ms, 2),
        "second_turn_uncached_ms": round(uncached_ms, 2),
    }


def main() -> int:
    """Writes ``benchmarks/results/second_turn.json``; returns 1 if the bar is missed."""
    command = [sys.executable, "-m", "hiserve.cli", "serve", "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = next(found.group() for line in server.stdout if (found := re.search(r"http://\S+", line)))
        with httpx.Client(base_url=url, timeout=120) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.1)
            rounds = [round_of(client, index) for index in range(ROUNDS)]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    cached = statistics.median(each["second_turn_ms"] for each in rounds)
    uncached = statistics.median(each["second_turn_uncached_ms"] for each in rounds)
    result = about("python benchmarks/second_turn.py", *SERVER, "benchmarks/second_turn.py") | {
        "second_turn_ms": cached,
        "second_turn_uncached_ms": uncached,
        "ratio": round(cached / uncached, 4),
        "bar": BAR,
        "rounds": rounds,
    }
    (ROOT / "benchmarks/results/second_turn.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"second turn {cached:.1f} ms, uncached {uncached:.1f} ms, ratio {cached / uncached:.3f} (bar {BAR})")
    return int(cached / uncached > BAR)


if __name__ == "__main__":
    sys.exit(main())
