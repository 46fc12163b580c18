"""Coding agents as npm gives them, in a network namespace of their own with loopback alone.

``make test-coding`` installs them, and starts these tests in the namespace: whatever they would send elsewhere goes nowhere.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.clients.forcing import LAST, TEMPLATE, Counts, check_step, counts, long_model
from tests.e2e.live import Live, serve
from tests.helpers.coding_agents import SEAL_KEY, head_of
from tests.helpers.waiting import PATIENCE_S
from tools.import_path import import_path

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".npm-clients" / "node_modules"
ASKED = ("Say so, please.", "Say it once more, please.")
SAID = "hiserve-said-so"
COMMAND = f"echo {SAID}"
LIMIT_S = 300


class Step(NamedTuple):
    """A request of an agent, and its tokens."""

    entry: dict[str, Any]
    counts: Counts


class Agent(NamedTuple):
    """A coding agent.

    Attributes:
        package: Of npm.
        program: Below the folder of packages.
        tool: A tool that runs commands, and its arguments.
        prepare: Given the server's address and the home folder, writes settings; returns arguments and environment.
    """

    package: str
    program: str
    tool: tuple[str, dict[str, str]]
    prepare: Callable[[str, Path], tuple[list[str], dict[str, str]]]


def claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    model = {"ANTHROPIC_MODEL": "model", "ANTHROPIC_SMALL_FAST_MODEL": "model"}
    return ["--allowedTools", "Bash", "-p"], {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", **model}


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    lines = ['model = "model"', 'model_provider = "here"', "[model_providers.here]", 'name = "here"']
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(
        "\n".join([*lines, f'base_url = "{url}/v1"', 'wire_api = "responses"'])
    )
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"], {}


def opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    limit = {"context": 65_536, "output": 4_096}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    provider["models"] = {"model": {"limit": limit}}
    settings = {"autoupdate": False, "permission": "allow", "provider": {"here": provider}}
    settings |= {"model": "here/model", "small_model": "here/model"}
    (home / ".config" / "opencode").mkdir(parents=True, exist_ok=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    return ["run"], {}


RUN = {"command": COMMAND, "description": "Says so"}
AGENTS = {
    "claude_code": Agent("@anthropic-ai/claude-code", "@anthropic-ai/claude-code-linux-x64/claude", ("Bash", RUN), claude),
    "codex": Agent("@openai/codex", "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex", ("exec_command", {"cmd": COMMAND}), codex),
    "opencode": Agent("opencode-ai", "opencode-linux-x64-baseline/bin/opencode", ("bash", RUN), opencode),
}  # fmt: skip


@dataclass
class Running:
    """A server, an agent's settings and the requests so far."""

    live: Live
    agent: Agent
    place: Path

    def ask(self, words: str) -> str:
        """Runs the agent once; returns what it printed."""
        home, source = self.place / "home", self.place / "src"
        home.mkdir(exist_ok=True)
        source.mkdir(exist_ok=True)
        arguments, environment = self.agent.prepare(self.live.url, home)
        environment |= {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [MODULES / self.agent.program, *arguments, words], env=environment, cwd=source, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def steps(self) -> list[Step]:
        """The requests and their tokens."""
        entries = [json.loads(line) for line in (self.place / "record.jsonl").read_text().splitlines()]
        asked = [entry for entry in entries if entry["reply"]]
        return [Step(*both) for both in zip(asked, counts(self.live), strict=True)]


@pytest.fixture(params=list(AGENTS))
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "start these tests by `make test-coding`"
    agent = AGENTS[request.param]
    record, (tool, arguments) = tmp_path / "record.jsonl", agent.tool
    command = (sys.executable, "-m", "tests.clients.forcing", json.dumps({tool: arguments}), str(record))
    flags = (*long_model(tmp_path / "model"), *TEMPLATE, "--cpu-threads", "1", "--seal-key", SEAL_KEY)
    with serve(tmp_path, *flags, command=command, environment={"PYTHONPATH": import_path(ROOT)}, is_fork=False) as live:
        yield Running(live, agent, tmp_path)
    kept = ROOT / "build" / "clients"
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(record, kept / f"{request.param}.jsonl")  # for tests.clients.recording


def test_an_agent_runs_a_tool_and_its_next_step_computes_what_is_new(running: Running) -> None:
    for words in ASKED:
        assert LAST in running.ask(words)
    steps = running.steps()
    assert all(step.entry["status"] == 200 for step in steps)
    loops = [step for step in steps if step.entry["body"].get("tools")]
    assert [LAST in step.entry["reply"] for step in loops] == [False, True] * 2
    for first, second in (loops[:2], loops[2:]):
        assert SAID in json.dumps(second.entry["body"]).replace(COMMAND, ""), "the tool ran"
        check_step(first.counts, second.counts)
    path, body = head_of(loops[2].entry)
    told: Any = httpx.post(f"{running.live.url}{path}", json=body, timeout=PATIENCE_S).raise_for_status().json()
    num_head = told.get("input_tokens") or told["count"]
    print(running.agent.package, f"system and tools {num_head}", *(step.counts for step in loops))
    assert loops[2].counts.cached >= 0.95 * num_head
    assert num_head > 5_000
