"""Programs that measure servers, each in an environment of its own: their requests succeed, and they count what the server counts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hiserve.models.model_config import NANO, find_model
from tests.e2e.live import Live

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
LIMIT_S = 400
NUM_REQUESTS, NUM_TOKENS = 12, 16
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def words():
    asked = [Sample(input=text, target="") for text in ("Two coffees, please.", "A table for two tonight?")]
    return Task(dataset=asked, solver=generate(), scorer=includes())
"""


def run(folder: Path, package: str, program: str, *arguments: str, **environment: str) -> None:
    """Runs a program of `make test-clients`."""
    command = [ROOT / f".venv-{package}" / "bin" / program, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"NO_COLOR": "1", "TERM": "dumb"} | environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_inspect_evaluates_a_task(live: Live, tmp_path: Path, protocol: str) -> None:
    before = live.counter("hiserve:request_success_total")
    (tmp_path / "task.py").write_text(TASK)
    model = (
        ["openai-api/here/hiserve-nano"] if protocol == "chat" else ["openai/hiserve-nano", "-M", "responses_api=true"]
    )
    keys = {"HERE_API_KEY": "none", "OPENAI_API_KEY": "none"}
    urls = dict.fromkeys(("HERE_BASE_URL", "OPENAI_BASE_URL"), f"{live.url}/v1")
    shown = ("--max-tokens", "16", "--display", "plain", "--log-dir", "logs", "--log-format", "json")
    run(tmp_path, "inspect-ai", "inspect", "eval", "task.py", "--model", *model, *shown, **keys, **urls)
    (log,) = (tmp_path / "logs").glob("*.json")
    told = read(log)
    assert (told["status"], told["results"]["scores"][0]["metrics"]["accuracy"]["value"]) == ("success", 1.0)
    assert live.counter("hiserve:request_success_total") - before >= 2  # of responses it tries one first


def test_guidellm_counts_the_servers_tokens(live: Live, tmp_path: Path) -> None:
    before = live.counter("hiserve:generation_tokens_total")
    run(
        tmp_path, "guidellm", "guidellm", "run", "--backend", f"kind=openai_http,target={live.url},model={NANO}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}", "--disable-progress",
        "--tokenizer", f"kind=hf_auto,model={find_model(NANO)}", "--output", "kind=json,path=out.json",
    )  # fmt: skip
    (benchmark,) = read(tmp_path / "out.json")["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert live.counter("hiserve:generation_tokens_total") - before >= NUM_REQUESTS * NUM_TOKENS


def test_aiperf_counts_the_servers_requests(live: Live, tmp_path: Path) -> None:
    before = live.counter("hiserve:request_success_total")
    run(
        tmp_path, "aiperf", "aiperf", "profile", "--model", NANO, "--url", live.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(find_model(NANO)), "--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--ui", "none",
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(NUM_TOKENS), "--artifact-dir", "out",
    )  # fmt: skip
    told = read(tmp_path / "out" / "profile_export_aiperf.json")
    assert told["request_count"]["avg"] == NUM_REQUESTS
    assert not told.get("error_summary")
    assert live.counter("hiserve:request_success_total") - before >= NUM_REQUESTS
