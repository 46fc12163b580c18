"""Requests of coding agents."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

SEAL_KEY = "of recorded thoughts"  # with it a recorded signature is good


def head_of(entry: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body that count the system and the tools of a request."""
    body, tools = entry["body"], entry["body"].get("tools")
    short = {"role": "user", "content": "Hi"}
    if entry["path"] == "/v1/messages":
        return "/v1/messages/count_tokens", {"system": body["system"], "messages": [short], "tools": tools}
    if entry["path"] == "/v1/responses":
        system = [item for item in body["input"] if item.get("role") == "developer"]
        return "/v1/responses/input_tokens", {"input": [*system, short], "tools": tools}
    system = [message for message in body["messages"] if message["role"] == "system"]
    return "/tokenize", {"messages": [*system, short], "tools": tools}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the requests of a file that ``tests.clients.recording`` wrote."""
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
