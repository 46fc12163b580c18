"""How schemathesis is run, and what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
COMMAND = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")


def num_cases(printed: str) -> int:
    """How many requests it made."""
    return int(_said(r"(\d+) generated", printed)[1])


def num_tested(printed: str) -> int:
    """How many operations it tested, which must be all that it was told to."""
    return int(_said(r"Selected: (\d+)/\d+\s+Tested: \1\n", printed)[1])


def _said(pattern: str, printed: str) -> re.Match[str]:
    found = re.search(pattern, printed)
    assert found, printed
    return found
