"""Every snippet of the README and of the guides is executed as it stands, but for the port; the others are named here with a reason."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.live import COMMAND, Live, serve
from tests.helpers import forks
from tests.helpers.snippets import ROOT, snippets
from tools import settings as settings_page

# Commands that are not executed here, and why.
NOT_RUN = {
    "git clone": "there is nothing to clone from",
    "hiserve bench soak": "takes minutes; tests/faults runs a short one",
    "hiserve bench spec": "takes minutes; tests/unit/commands runs a small one",
    "hiserve doctor --graphs": "tests/unit/commands runs it; without a GPU it runs nothing",
    "hiserve serve meta-llama": "needs a GPU and a hub",
    "make demo": "is the demo itself; it installs into a .venv of its own",
    "make test": "runs this test",
    "pip install": "needs a package index",
}
LIMIT_S = 600


@dataclass(frozen=True)
class Snippet:
    """A fenced block."""

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def is_serve(self) -> bool:
        return self.language == "bash" and self.commands[0].startswith("hiserve serve --port")

    @property
    def is_serve_with_tiers(self) -> bool:
        return self.language == "bash" and self.commands[0].startswith("hiserve serve --host-cache")

    @property
    def is_serve_with_drafts(self) -> bool:
        return self.language == "bash" and self.commands[0].startswith("hiserve serve --spec")

    @property
    def is_batch(self) -> bool:
        return self.language == "bash" and self.commands[-1].startswith("hiserve generate --batch")

    @property
    def is_request(self) -> bool:
        return self.language == "bash" and self.commands[0].startswith("curl ")

    @property
    def is_not_run(self) -> bool:
        return self.language == "bash" and all(command.startswith(tuple(NOT_RUN)) for command in self.commands)


PAGES = ("README.md", "docs/index.md", "docs/operations.md", "docs/benches.md", "docs/nano.md", "docs/api.md")
# A snippet that stands on two pages is one snippet.
SNIPPETS = [
    Snippet(language, text) for language, text in dict.fromkeys(pair for page in PAGES for pair in snippets(page))
]


def of(kind: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if getattr(snippet, kind)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server of the README, on a free port."""
    (snippet,) = of("is_serve")
    argv = shlex.split(snippet.text)[2:]
    at = argv.index("--port")
    with serve(tmp_path_factory.mktemp("readme"), *argv[:at], *argv[at + 2 :], "--spec", "auto") as live:
        assert f":{argv[at + 1]}" not in live.url
        yield live


def test_every_snippet_is_executed_or_named_here() -> None:
    known = {"python": [snippet for snippet in SNIPPETS if snippet.language == "python"]}
    kinds = ("is_serve", "is_serve_with_tiers", "is_serve_with_drafts", "is_batch", "is_request", "is_not_run")
    known |= {kind: of(kind) for kind in kinds}
    assert sorted(snippet.text for each in known.values() for snippet in each) == sorted(each.text for each in SNIPPETS)
    assert all(known.values()), "the pages show no snippet of some kind"


def test_what_is_not_run_is_still_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for snippet in of("is_not_run"):
        for command in snippet.commands:
            if command.startswith("make "):
                assert command.split()[1] in targets


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.language == "python"])
def test_a_program_runs(snippet: Snippet, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        done = forks.run([sys.executable, "-c", snippet.text], os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("snippet", of("is_request"))
def test_a_request_is_answered(snippet: Snippet, server: Live) -> None:
    (shown,) = set(re.findall(r"http://[\w.]+:\d+", snippet.text))
    done = subprocess.run(
        ["bash", "-c", snippet.text.replace(shown, server.url)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] >= 1


def test_a_server_with_all_tiers_starts_and_answers(tmp_path: Path) -> None:
    (snippet,) = of("is_serve_with_tiers")
    name = f"readme-{os.getpid()}"
    values = {"--host-cache-name": name, "--store": f"file:{tmp_path / 'pages'}"}  # in place of those shown
    argv = shlex.split(snippet.text)[2:]
    argv = [values.get(before, each) for before, each in zip(["", *argv], argv, strict=False)]
    try:
        with serve(tmp_path, *argv) as live:
            body = {"prompt": "def add(a, b):\n" * 20, "max_tokens": 1}
            usage = [httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()["usage"] for _ in range(2)]
        assert usage[1]["prompt_tokens_details"]["cached_tokens"] > 0
        assert list((tmp_path / "pages").iterdir())
    finally:
        for left in Path("/dev/shm").glob(f"*hiserve-{name}*"):
            left.unlink()


def test_a_server_that_drafts_starts_and_says_what_was_accepted(tmp_path: Path) -> None:
    (snippet,) = of("is_serve_with_drafts")
    argv = [*shlex.split(snippet.text)[2:], "--spec-steps", "2"]  # chosen by itself it may well be none
    with serve(tmp_path, *argv) as live:
        body = {"prompt": "def add(a, b):\n" * 20, "max_tokens": 16, "ignore_eos": True}
        usage = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()["usage"]
    assert usage["completion_tokens"] == 16
    assert usage["spec_tokens_details"]["verify_steps"] > 0


def test_a_batch_is_answered(tmp_path: Path) -> None:
    (snippet,) = of("is_batch")
    told = "hiserve() { printf '%s\\n' \"$@\" > arguments; }\n" + snippet.text
    subprocess.run(["bash", "-c", told], cwd=tmp_path, timeout=LIMIT_S, check=True)
    with contextlib.chdir(tmp_path):
        done = forks.run([*COMMAND, *Path("arguments").read_text().splitlines()], os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("2 replies added to replies.jsonl\n")
    replies = [json.loads(line) for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert {reply["custom_id"] for reply in replies} == {"a", "b"}
    assert all(reply["response"]["body"]["choices"] for reply in replies)


def test_the_request_of_the_readme_goes_to_the_server_of_the_readme() -> None:
    (served,) = of("is_serve")
    argv = shlex.split(served.text)
    for request in of("is_request"):
        assert f":{argv[argv.index('--port') + 1]}/" in request.text


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page.page(), "run python -m tools.settings"
