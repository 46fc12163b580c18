"""``python -m tools.graph_lint`` prints the violations in hiserve's hot path."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.graph_lint.allowed import ALLOWED
from tools.graph_lint.scan import PATTERNS, scan

PACKAGE = Path(__file__).parents[2] / "hiserve"


def main() -> int:
    """Prints violations, and exceptions that cover nothing any more; returns 1 if there is one."""
    found = scan(PACKAGE, ALLOWED)
    for each in found.violations:
        print(f"hiserve/{each.file}:{each.line}: {each.function}: {each.pattern} {PATTERNS[each.pattern]}: {each.text}")
    for entry in found.idle:
        print(f"tools/graph_lint/allowed.py: {entry.file} {entry.function} no longer needs {entry.pattern}; remove it")
    return int(bool(found.violations or found.idle))


if __name__ == "__main__":
    sys.exit(main())
