"""Plays a chat and the two steps of a tool call with the embedded model over HTTP, and shows what the cache did.

Starts ``hiserve serve`` on a free port, streams each reply, prints time to first token,
tokens per second and cached prompt tokens, and stops the server cleanly. The model calls
a function of this file and answers with its result.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
from rich.console import Console

CHAT = (
    "Hi, I would like to find a place to eat in San Jose.",
    "Italian food please, and not too expensive.",
    "That sounds good. Please book a table for 2 people at 7 pm.",
    "Yes, that is right.",
    "Thank you, that is all.",
)
QUESTION = "What is the weather in San Jose on March 9th?"
PLACE = {"city": {"type": "string", "description": "The city"}, "date": {"type": "string", "description": "The day"}}
SCHEMA = {"type": "object", "properties": PLACE, "required": ["city", "date"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": SCHEMA}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "max_tokens": 96}
STREAM = {"model": "hiserve-nano", "stream": True, "stream_options": {"include_usage": True}}


def get_weather(city: str, date: str) -> str:
    """The function that the model calls."""
    return json.dumps({"temperature": 71, "chance_of_rain": 15, "city": city, "date": date})


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Starts the server; returns it with its address once the model is loaded."""
    command = [sys.executable, "-m", "hiserve.cli", "serve", "hiserve-nano", "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://\S+", line):
            return server, found.group()
    raise SystemExit(f"the server ended with status {server.wait()} before it was ready")


def reply(client: httpx.Client, console: Console, messages: list[dict[str, Any]], **fields: Any) -> int:
    """Streams one reply to the terminal and appends it to the messages; returns the prompt tokens from the cache."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage: dict[str, Any] = {}
    times = [time.perf_counter()]
    console.print("[bold green]nano [/] ", end="")
    body = {**STREAM, "messages": messages, **fields}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                shown = choice["delta"].get("content") or ""
                message["content"] += shown
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        message["tool_calls"].append(call)
                        shown += call["function"]["name"] + " "
                    else:
                        message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
                    shown += call["function"]["arguments"]
                if shown:
                    times.append(time.perf_counter())
                    console.print(shown, end="", markup=False)
    messages.append({key: value for key, value in message.items() if value or key == "content"})
    first, seconds = times[1] - times[0], times[-1] - times[1]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    console.print(
        f"\n[dim]      TTFT {first * 1e3:.0f} ms, {(usage['completion_tokens'] - 1) / max(seconds, 1e-9):.0f} tokens/s, "
        f"{cached} of {usage['prompt_tokens']} prompt tokens from cache[/]\n"
    )
    return cached


def ask(client: httpx.Client, console: Console, messages: list[dict[str, Any]], text: str, **fields: Any) -> int:
    """Appends a user's message and streams the reply to it; returns the prompt tokens from the cache."""
    messages.append({"role": "user", "content": text})
    console.print(f"[bold cyan]you  [/] {text}")
    return reply(client, console, messages, **fields)


def agent(client: httpx.Client, console: Console) -> int:
    """Asks what needs a call, carries it out and lets the model answer; returns the cached tokens of this step."""
    messages: list[dict[str, Any]] = []
    fields = {"tools": [{"type": "function", "function": FUNCTION}], "temperature": 0}
    ask(client, console, messages, QUESTION, **fields)
    for call in messages[-1]["tool_calls"]:
        result = get_weather(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        console.print(f"[bold magenta]tool [/] {result}")
    return reply(client, console, messages, **fields)


def main() -> int:
    """Runs the demo; returns 1 if a later turn was not served from the cache."""
    console = Console(highlight=False)
    console.print(
        "[bold]hiserve demo[/]: a chat and a call of a tool with hiserve-nano, the embedded 7 M parameter model"
    )
    start = time.perf_counter()
    server, url = start_server()
    console.print(f"[dim]{url} ready after {time.perf_counter() - start:.1f} s[/]\n")
    try:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            messages: list[dict[str, Any]] = []
            cached = [ask(client, console, messages, text, **SAMPLING) for text in CHAT]
            later = [*cached[1:], agent(client, console)]
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=30)
    console.print(f"[dim]server stopped with status {status}[/]")
    if status != 0 or min(later) == 0:
        console.print(
            "[bold red]the demo failed[/]: a later turn was not served from the cache, or the stop was unclean"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
