"""lm-eval with tasks of our own: generation, and log-likelihoods that are the server's own prompt scores."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.e2e.live import Live

pytestmark = pytest.mark.clients
LIMIT_S = 200
CHOICES = [
    {"question": "I would like a small cup of", "choices": ["coffee", "airplane", "the the the"], "label": 0},
    {"question": "Can you book a table for two", "choices": ["tonight?", "zebra?"], "label": 0},
    {"question": "What time would you like the", "choices": ["reservation for?", "lambda def"], "label": 0},
]
TEXTS = [{"question": "Would you like", "answer": ""}, {"question": "I need a ride to", "answer": ""}]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    choose = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    generate = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": MAX_TOKENS, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    for name, task, rows in (("choose", choose, CHOICES), ("generate", generate, TEXTS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        shown = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps(shown | {"doc_to_text": "{{question}}"} | task))
    return folder


@pytest.fixture(scope="module")
def samples(live: Live, tasks: Path) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval saw, by task."""
    out = tasks / "out"
    arguments = f"model={NANO},base_url={live.url}/v1/completions,tokenizer={find_model(NANO)}"
    arguments += ",num_concurrent=2,tokenized_requests=True,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", str(tasks), "--tasks", "choose,generate", "--log_samples", "--output_path", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tasks, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("choose", "generate"):
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = sorted(lines, key=lambda sample: int(sample["doc_id"]))
    return found


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{live.url}/v1/completions", json={"temperature": 0} | fields, timeout=60)
    return dict(reply.raise_for_status().json()["choices"][0])


def test_log_likelihoods_are_the_servers_prompt_scores(live: Live, samples: dict[str, list[dict[str, Any]]]) -> None:
    tokenizer = Tokenizer.load(find_model(NANO))
    num_scored = 0
    for row, sample in zip(CHOICES, samples["choose"], strict=True):
        start = len(tokenizer.encode(row["question"], add_special_tokens=False))
        for choice, ((score, is_greedy),) in zip(row["choices"], sample["resps"], strict=True):
            tokens = tokenizer.encode(f"{row['question']} {choice}", add_special_tokens=False).tolist()
            entries = ask(live, prompt=tokens, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
            rest = [(entries[at], str(tokens[at])) for at in range(start, len(tokens))]
            assert math.isclose(float(score), sum(entry[token]["logprob"] for entry, token in rest), abs_tol=1e-3)
            best = [entry[token]["logprob"] == max(each["logprob"] for each in entry.values()) for entry, token in rest]
            assert is_greedy == str(all(best))
            num_scored += 1
    assert num_scored == sum(len(row["choices"]) for row in CHOICES)


def test_the_likelier_answer_is_chosen(samples: dict[str, list[dict[str, Any]]]) -> None:
    assert [sample["acc"] for sample in samples["choose"]] == [1.0] * len(CHOICES)


def test_generated_texts_are_the_servers_own(live: Live, samples: dict[str, list[dict[str, Any]]]) -> None:
    for row, sample in zip(TEXTS, samples["generate"], strict=True):
        tokens = Tokenizer.load(find_model(NANO)).encode(row["question"], add_special_tokens=False).tolist()
        own = ask(live, prompt=tokens, max_tokens=MAX_TOKENS, stop=["\n"])
        assert sample["resps"] == [[own["text"]]]
        assert own["text"]
