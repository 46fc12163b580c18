"""Calls of 500 functions of the Berkeley Function Calling Leaderboard: each that must be made is made, and is valid.

The data is of the package bfcl-eval (Apache-2.0), which ``make test-clients`` installs without its dependencies.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from hiserve.models.model_config import NANO
from tests.e2e.live import Live

pytestmark = pytest.mark.clients
ENVIRONMENT = Path(__file__).parents[2] / ".venv-bfcl-eval"
NUM_FUNCTIONS, NUM_AT_ONCE, MOST_TOKENS = 500, 32, 1500
LIMIT_S = 3600  # of all calls, on a busy machine too
# Bounds that let a small model end.
MOST_CHARS, MOST_ENTRIES = 8, 2
TYPES = {"dict": "object", "float": "number", "tuple": "array", "HashMap": "object", "hashtable": "object"}
TYPES |= {
    "Array": "array",
    "ArrayList": "array",
    "Boolean": "boolean",
    "Bigint": "integer",
    "double": "number",
    "long": "integer",
}
KEPT = ("enum", "required", "minimum", "maximum")


def schema_of(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a function's parameters as JSON schema: types by their names there, objects closed, texts and lists bounded."""
    kind = TYPES.get(given.get("type", ""), given.get("type", "string"))
    kind = kind if kind in ("object", "array", "string", "integer", "number", "boolean") else "string"
    made = {"type": kind} | {
        name: given[name] for name in KEPT if name in given and not (kind == "array" and name == "enum")
    }
    if kind == "object":
        properties = {name: schema_of(each) for name, each in given.get("properties", {}).items()}
        made |= {"properties": properties, "additionalProperties": False}
        made["required"] = [name for name in given.get("required", ()) if name in properties]
    elif kind == "array":
        made |= {"items": schema_of(given.get("items", {})), "maxItems": MOST_ENTRIES}
    elif kind == "string" and "enum" not in made:
        made["maxLength"] = MOST_CHARS
    return made


def functions() -> list[dict[str, Any]]:
    """The functions that are drawn."""
    (data,) = ENVIRONMENT.glob("lib/python*/site-packages/bfcl_eval/data")
    found: dict[str, dict[str, Any]] = {}
    for path in sorted({*data.glob("BFCL_v4_*.json")} - {data / "BFCL_v4_format_sensitivity.json"}):
        for line in path.read_text().splitlines():
            for each in json.loads(line).get("function", ()):
                found.setdefault(json.dumps(each["parameters"], sort_keys=True), each)
    return random.Random(20_261_123).sample(list(found.values()), NUM_FUNCTIONS)


@pytest.mark.timeout(LIMIT_S)
async def test_every_call_of_500_functions_is_valid(live: Live) -> None:
    gate, ends = asyncio.Semaphore(NUM_AT_ONCE), Counter[str]()

    async def ask(client: openai.AsyncOpenAI, seed: int, given: dict[str, Any]) -> None:
        schema = schema_of(given["parameters"])
        name = given["name"].replace(".", "_")[:64]
        function = {"name": name, "description": given["description"][:200], "parameters": schema}
        tools: Any = [{"type": "function", "function": function}]
        choice: Any = {"type": "function", "function": {"name": name}}
        asked: Any = {
            "model": NANO,
            "messages": [{"role": "user", "content": "Please."}],
            "max_tokens": MOST_TOKENS,
            "seed": seed,
        }
        async with gate:
            reply = await client.chat.completions.create(**asked, tools=tools, tool_choice=choice)
        (end,) = reply.choices
        ends[end.finish_reason] += 1
        if end.finish_reason == "length":
            return
        (call,) = end.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        jsonschema.validate(json.loads(call.function.arguments), schema)

    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        await asyncio.gather(*(ask(client, seed, each) for seed, each in enumerate(functions())))
    print(dict(ends))
    assert ends.pop("length", 0) <= NUM_FUNCTIONS // 100, "so many say nothing"
    assert set(ends) == {"tool_calls"}
