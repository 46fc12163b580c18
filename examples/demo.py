"""Plays a multi-turn chat with the embedded model over HTTP, and shows what the cache did.

Starts ``hiserve serve`` on a free port, streams each reply, prints time to first token,
tokens per second and cached prompt tokens, and stops the server cleanly.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import httpx
from rich.console import Console

TURNS = (
    "Hi, I would like to find a place to eat in San Jose.",
    "Italian food please, and not too expensive.",
    "That sounds good. Please book a table for 2 people at 7 pm.",
    "Yes, that is right.",
    "Thank you, that is all.",
)


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Starts the server; returns it with its address once the model is loaded."""
    command = [sys.executable, "-m", "hiserve.cli", "serve", "hiserve-nano", "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://\S+", line):
            return server, found.group()
    raise SystemExit(f"the server ended with status {server.wait()} before it was ready")


def play_turn(client: httpx.Client, console: Console, messages: list[dict[str, str]]) -> dict[str, float]:
    """Streams one reply to the terminal, appends it to the messages and returns its figures."""
    body = {
        "model": "hiserve-nano",
        "messages": messages,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "max_tokens": 96,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    usage: dict = {}
    start = time.perf_counter()
    first = last = start
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = first if pieces else last
                    pieces.append(text)
                    console.print(text, end="", markup=False, highlight=False)
    messages.append({"role": "assistant", "content": "".join(pieces)})
    decoded = max(usage["completion_tokens"] - 1, 1)
    return {
        "ttft_ms": (first - start) * 1e3,
        "tokens_per_s": decoded / max(last - first, 1e-9),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


def main() -> int:
    """Runs the demo; returns 1 if a later turn was not served from the cache."""
    console = Console(highlight=False)
    console.print("[bold]hiserve demo[/]: a chat with hiserve-nano, the embedded 7 M parameter model")
    start = time.perf_counter()
    server, url = start_server()
    console.print(f"[dim]{url} ready after {time.perf_counter() - start:.1f} s[/]\n")
    hits = []
    try:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(TURNS, start=1):
                messages.append({"role": "user", "content": text})
                console.print(f"[bold cyan]you  [/] {text}\n[bold green]nano [/] ", end="")
                figures = play_turn(client, console, messages)
                hits.append(figures["cached_tokens"])
                console.print(
                    f"\n[dim]      turn {turn}: TTFT {figures['ttft_ms']:.0f} ms, {figures['tokens_per_s']:.0f} tokens/s, "
                    f"{figures['cached_tokens']:.0f} of {figures['prompt_tokens']:.0f} prompt tokens from cache[/]\n"
                )
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=30)
    console.print(f"[dim]server stopped with status {status}[/]")
    if status != 0 or min(hits[1:]) == 0:
        console.print(
            "[bold red]the demo failed[/]: a later turn was not served from the cache, or the stop was unclean"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
