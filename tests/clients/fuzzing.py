"""How schemathesis is run."""

from __future__ import annotations

import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
COMMAND = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")
