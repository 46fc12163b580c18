"""Requests that ``forcing`` has recorded, with their structure kept and their texts replaced: prompts of others are not ours to commit.

Run as ``python -m tests.clients.recording RECORD FILE``.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import sys
from pathlib import Path
from typing import Any

LONGEST_NAME = 64
KEPT = re.compile(r"x-anthropic-billing-header: [ -~]{1,80}")
KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "user-agent", "content-type")
SEALS = ("signature", "encrypted_content")
OWN = (
    "Say so, please.",
    "Say it once more, please.",
    "Says so",
    "echo hiserve-said-so",
    "hiserve-said-so",
    "Let me see.",
    "so it is",
)
WORDS = (
    "table",
    "for",
    "two",
    "near",
    "the",
    "window",
    "and",
    "one",
    "small",
    "tea",
    "with",
    "milk",
    "what",
    "we",
    "would",
)


def filler(text: str) -> str:
    """Returns words of the same length, line by line: equal lines stay equal, and others differ."""
    lines = []
    for line in text.split("\n"):
        if line in OWN:
            lines.append(line)
            continue
        rng = random.Random(hashlib.sha256(line.encode()).digest())
        made = ""
        while len(made) < len(line):
            made += rng.choice(WORDS) + " "
        lines.append(made[: len(line)])
    return "\n".join(lines)


def replaced(value: Any, key: str = "") -> Any:
    """Returns a value with its texts replaced; names, types and numbers stay."""
    if isinstance(value, dict):
        return {name: replaced(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, key) for each in value]
    if not isinstance(value, str) or key in SEALS or KEPT.fullmatch(value):
        return value
    try:
        spelled = json.loads(value)
    except ValueError:
        spelled = None
    if isinstance(spelled, dict):  # arguments of calls
        return json.dumps(replaced(spelled), separators=(",", ":")) if key == "arguments" else filler(value)
    is_name = len(value) <= LONGEST_NAME and re.fullmatch(r"[\w.$:/=-]+", value)
    return value if is_name and "/tmp/" not in value else filler(value)


def main(record: Path, path: Path) -> int:
    """Writes the requests of a record whose replies were forced."""
    lines = []
    for entry in map(json.loads, record.read_text().splitlines()):
        if not entry["reply"]:
            continue
        entry["headers"] = {name: entry["headers"][name] for name in KEPT_HEADERS if name in entry["headers"]}
        lines.append(json.dumps(entry | {"body": replaced(entry["body"])}))
    path.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
