"""What was recorded: a hash of each log, and the logs themselves, so that a difference can be shown."""

from __future__ import annotations

import difflib
import hashlib
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
HASHES, PACKED = "hashes.json", "logs.xz"
MAX_SHOWN = 60  # lines of a difference

Reword = Callable[[str], str]


@dataclass(frozen=True)
class Logs:
    """Logs by name, each a list of lines."""

    lines: dict[str, list[str]]  # as recorded

    @classmethod
    def load(cls, folder: Path = DATA) -> Logs:
        """Reads the recorded logs; none without a file."""
        path = folder / PACKED
        if not path.exists():
            return cls({})
        logs = cls(json.loads(lzma.decompress(path.read_bytes())))
        hashes = json.loads((folder / HASHES).read_text())
        assert hashes == logs.hashes(), f"{HASHES} is not of the logs in {PACKED}; record anew"
        return logs

    def save(self, folder: Path = DATA) -> None:
        """Writes the hashes, readable, and the logs, packed."""
        folder.mkdir(exist_ok=True)
        ordered = dict(sorted(self.lines.items()))
        (folder / PACKED).write_bytes(lzma.compress(json.dumps(ordered).encode(), preset=9))
        (folder / HASHES).write_text(json.dumps(self.hashes(), indent=1, sort_keys=True) + "\n")

    def hashes(self) -> dict[str, str]:
        """Returns the hash of each log."""
        return {name: digest(lines) for name, lines in self.lines.items()}


def digest(lines: Sequence[str]) -> str:
    """Returns 32 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Returns the first step (or answer) in which two logs differ, as a unified diff; empty where they are alike.

    A step begins with a line that is not indented.
    """
    first = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        if len(old) == len(new):
            return ""
        first = min(len(old), len(new))
    before, now = _step_at(old, first), _step_at(new, first)
    shown = list(difflib.unified_diff(before, now, "recorded", "now", n=MAX_SHOWN, lineterm=""))
    left = len(shown) - MAX_SHOWN
    return "\n".join([f"line {first + 1}:", *shown[:MAX_SHOWN], *([f"... {left} lines more"] if left > 0 else [])])


def _step_at(lines: Sequence[str], at: int) -> list[str]:
    begin = next((index for index in range(min(at, len(lines) - 1), -1, -1) if not lines[index].startswith(" ")), 0)
    end = next(
        (index for index in range(max(at, begin + 1), len(lines)) if not lines[index].startswith(" ")), len(lines)
    )
    return list(lines[begin : max(end, begin + 1)])
