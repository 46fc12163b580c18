"""The page for agents: its programs run against a live server, its settings reach one, its metrics and flags exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hiserve.config.options import flags
from tests.e2e.live import Live, serve
from tests.helpers.forks import run_here
from tests.helpers.snippets import NEEDS_AGENTS, ROOT, SHOWN, of_agents, snippets
from tests.helpers.waiting import PATIENCE_S

PAGE = (ROOT / "docs" / "agents.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server of the page, on a free port."""
    argv = shlex.split(of_agents("bash")[0])[2:]
    assert argv[:2] == ["--port", SHOWN.rpartition(":")[2]]
    with serve(tmp_path_factory.mktemp("agents"), *argv[2:], "--cpu-threads", "1") as live:
        yield live


def run(program: str, server: Live, **environment: str) -> str:
    """Runs a program of the page; returns what it prints."""
    done = run_here(program.replace(SHOWN, server.url), os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_run_here_or_by_the_tests_of_clients() -> None:
    kinds = [language for language, _ in snippets("docs/agents.md")]
    assert sorted(kinds) == ["bash", "bash", "json", "python", "python", "python", "python", "toml"]
    assert sum(NEEDS_AGENTS in text for text in of_agents("python")) == 1
    assert SHOWN + "/v1" in PAGE


def test_the_loop_calls_the_tool_and_answers_from_the_cache(server: Live) -> None:
    (program,) = [text for text in of_agents("python") if "tool_call_id" in text]
    first, called, second, *answer = run(program, server).splitlines()
    assert called.startswith("get_weather {")
    cached, prompt = map(int, re.findall(r"\d+", second)[1:])
    assert first.startswith("step 0: 0 of ") and 0 < cached < prompt
    assert answer


def test_structured_output_is_parsed(server: Live) -> None:
    (program,) = [text for text in of_agents("python") if "response_format" in text]
    assert re.fullmatch(r"drink='(espresso|latte|tea)' size='(small|large)'\n", run(program, server))


def test_messages_call_the_tool_and_answer_from_the_cache(server: Live) -> None:
    (program,) = [text for text in of_agents("python") if "import Anthropic" in text]
    first, second = run(program, server).splitlines()
    assert first.startswith("tool_use ")
    assert int(second.split()[1]) > int(first.split()[1])


def test_the_variables_of_claude_code_lead_here(server: Live) -> None:
    """The SDK reads the same ones."""
    (exports,) = [text for text in of_agents("bash") if "ANTHROPIC" in text]
    pairs = [line.removeprefix("export ").split("=") for line in exports.replace(SHOWN, server.url).splitlines()]
    program = """
import anthropic, os
for model in (os.environ["ANTHROPIC_MODEL"], os.environ["ANTHROPIC_DEFAULT_HAIKU_MODEL"]):
    said = [{"role": "user", "content": "Hi"}]
    print(anthropic.Anthropic().messages.create(model=model, messages=said, max_tokens=16).usage.output_tokens)
"""
    assert all(int(count) > 0 for count in run(program, server, **dict(pairs)).split())


def test_the_settings_of_codex_and_opencode_lead_here(server: Live) -> None:
    codex: dict[str, Any] = tomllib.loads(of_agents("toml")[0].replace(SHOWN, server.url))
    opencode: dict[str, Any] = json.loads(of_agents("json")[0].replace(SHOWN, server.url))
    provider = codex["model_providers"][codex["model_provider"]]
    assert provider["wire_api"] == "responses"
    said = {"role": "user", "content": "Hi"}
    asked: list[tuple[str, dict[str, Any]]] = [
        (f"{provider['base_url']}/responses", {"model": codex["model"], "input": [said], "max_output_tokens": 8})
    ]
    for name in ("model", "small_model"):
        key, _, model = opencode[name].partition("/")
        options = opencode["provider"][key]["options"]
        assert model in opencode["provider"][key]["models"]
        asked.append((f"{options['baseURL']}/chat/completions", {"model": model, "messages": [said], "max_tokens": 8}))
    for url, body in asked:
        assert httpx.post(url, json=body, timeout=PATIENCE_S).raise_for_status().json()["usage"]


def test_the_metrics_and_flags_of_the_page_exist(server: Live) -> None:
    shown = set(re.findall(r"^(hiserve:\w+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))
    named = set(re.findall(r"`(hiserve:\w+)`", PAGE))
    assert len(named) >= 8 and named - shown == set()
    assert {flag[2:].replace("-", "_") for flag in re.findall(r"(?<!-)--[a-z][a-z-]+", PAGE)} <= set(flags())
