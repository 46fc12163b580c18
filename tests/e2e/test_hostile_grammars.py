"""A caller who sends grammars that end processes is refused; other callers get their tokens, and new grammars of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import serve
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.widening import some

NUM_HOSTILE = 6, 20
FLAGS = ("hiserve-nano", "--device", "cpu", "--cpu-threads", "1", "--kv-pages", "300", "--config")
STREAM: dict[str, Any] = {
    "prompt": "Hello there",
    "max_tokens": 150,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


async def stream(http: httpx.AsyncClient) -> list[str]:
    """The texts of a long reply's events."""
    async with http.stream("POST", "/v1/completions", json=STREAM, headers=key("good")) as reply:
        lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["text"] for line in lines]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def ask(http: httpx.AsyncClient, name: str, **fields: Any) -> tuple[int, str]:
    """The status and the code of the error, or the text."""
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, **fields}
    reply = await http.post("/v1/completions", json=body, headers=key(name))
    told = reply.json()
    return reply.status_code, told["error"]["code"] if reply.is_error else told["choices"][0]["text"]


@pytest.mark.parametrize("num_hostile", some(NUM_HOSTILE, NUM_HOSTILE[0]))
async def test_hostile_grammars_cost_their_caller_alone(tmp_path: Path, num_hostile: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("api_key: [good, bad]\n")
    with serve(tmp_path, *FLAGS, str(config)) as live:
        # A trial that gets no CPU may take a minute of wall time, and two of them run.
        async with httpx.AsyncClient(base_url=live.url, timeout=3 * PATIENCE_S, trust_env=False) as http:
            calm = await stream(http)
            known = await ask(http, "good", regex="(yes|no)")
            pids = live_pids(live.process.pid)
            hostile = [{"type": "integer", "multipleOf": 1_234_567 + index} for index in range(num_hostile)]
            attack = [asyncio.create_task(ask(http, "bad", guided_json=schema)) for schema in hostile]
            beside = await stream(http)
            assert await ask(http, "good", regex="(yes|no)") == known
            ends = await asyncio.gather(*attack)
            assert sorted(ends) == [(400, "grammar_too_complex")] * 2 + [(429, "overloaded")] * (num_hostile - 2)
            assert await ask(http, "bad", regex="(yes|no)") == known, "a grammar that is known costs nothing"
            assert (await ask(http, "bad", regex="(ja|nein)"))[0] == 429
            assert (await ask(http, "good", regex="(ja|nein)"))[1] in ("ja", "nein")
        assert "".join(beside) == "".join(calm)
        assert len(live_pids(live.process.pid)) == len(pids), "a process was left over"


def live_pids(parent: int) -> list[str]:
    """Child processes of the API process."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
