"""``hiserve generate``: lines in, JSON lines out, in order; a wrong line is answered and does not stop the others."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hiserve
from hiserve import cli
from hiserve.commands import generate
from hiserve.commands.generate import InputLine, PromptBatch
from hiserve.core.request import SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import ConfigError, ContextLengthError, EngineError
from hiserve.llm import CompletionOutput, RequestOutput, TokenLogprob

CURSED = ord("!")


class FakeLLM:
    """Answers a prompt with its tokens backwards, one request behind its reading."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.default_sampling = SamplingParams(temperature=0.6)
        self.seen: list[SamplingParams] = []

    def encode(self, prompt: str | list[int]) -> list[int]:
        if len(prompt) > 20:
            raise ContextLengthError("too long.", param="prompt")
        return [ord(char) for char in prompt] if isinstance(prompt, str) else prompt

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(messages[-1]["content"])

    def generate_each(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> Iterator[RequestOutput]:
        last: RequestOutput | None = None
        for tokens, sampling in requests:
            self.seen.append(sampling)
            if last:
                yield last
            scores = [TokenLogprob(tokens[-1], -1.5, {})] if sampling.logprobs is not None else None
            now_s = time.perf_counter()
            times = {"first_token_s": now_s + 1, "end_s": now_s + 3}
            choices = [CompletionOutput(i, "", tokens[::-1], "stop", None, scores, **times) for i in range(sampling.n)]
            last = RequestOutput(None, np.array(tokens, dtype=np.int32))
            last.cached = CacheUse(device=1)
            for choice in choices:
                last.add(choice)
            last.error = EngineError("cursed") if tokens[0] == CURSED else None
        if last:
            yield last

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hiserve, "LLM", FakeLLM, raising=False)


def run(*argv: str) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    stdout, sys.stdout = sys.stdout, out
    try:
        status = cli.main(["generate", *argv])
    finally:
        sys.stdout = stdout
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


def objects(*lines: Any) -> list[InputLine]:
    return [InputLine(line if isinstance(line, str) else json.dumps(line), is_json=True) for line in lines]


def test_a_text_a_line_and_objects_from_files(tmp_path: Path) -> None:
    texts, requests = tmp_path / "prompts.txt", tmp_path / "requests.jsonl"
    texts.write_text("ab\n\n  \n{c}\n", encoding="utf-8")
    requests.write_text('{"prompt": "x\u2028y", "id": 7}\n{"token_ids": [5, 6], "n": 2}\n', encoding="utf-8")
    status, results = run("--input", str(texts), "--input", str(requests))
    assert status == 0
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    tokens = [[choice["token_ids"] for choice in result["choices"]] for result in results]
    assert tokens == [[[98, 97]], [[125, 99, 123]], [[121, 0x2028, 120]], [[6, 5], [6, 5]]]
    assert [result.get("id") for result in results] == [None, None, 7, None]
    assert all(result["cached_tokens"] == 1 and "logprobs" not in result["choices"][0] for result in results)


def test_times_count_from_the_reading_of_the_line(tmp_path: Path) -> None:
    texts = tmp_path / "prompts.txt"
    texts.write_text("a\nb\n")
    for result in run("--input", str(texts))[1]:
        (choice,) = result["choices"]
        assert 1 <= choice["first_token_s"] < 100, "seconds, and no reading of a clock"
        assert choice["end_s"] - choice["first_token_s"] == pytest.approx(2, abs=1e-5)


def test_ctrl_c_says_how_many_results_were_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeLLM):
        def generate_each(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> Iterator[RequestOutput]:
            yield next(super().generate_each(requests))
            raise KeyboardInterrupt

    monkeypatch.setattr(hiserve, "LLM", Interrupted, raising=False)
    texts = tmp_path / "prompts.txt"
    texts.write_text("a\nb\nc\n")
    status, results = run("--input", str(texts))
    assert (status, len(results)) == (130, 1)
    assert "stopped early: 1 results were written" in capsys.readouterr().err


def test_a_line_that_the_engine_fails_has_its_error_and_the_others_their_results() -> None:
    batch = PromptBatch(FakeLLM(), {})
    results = list(batch.run(objects({"prompt": "ab"}, {"prompt": "!"}, {"prompt": "cd"})))
    assert results[1] == {"index": 1, "error": {"message": "cursed", "param": None, "code": "engine_error"}}
    assert [result["choices"][0]["token_ids"] for result in results[::2]] == [[98, 97], [100, 99]]
    assert batch.num_refused == 1


def test_standard_input_has_texts_and_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('ab\n\n {"prompt": "c", "logprobs": 0}\n'))
    out = tmp_path / "out.jsonl"
    status, printed = run("--output", str(out))
    assert (status, printed) == (0, [])
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["choices"][0]["token_ids"] == [98, 97]
    assert second["choices"][0]["logprobs"] == [{"token_id": 99, "logprob": -1.5, "top": {}}]


def test_what_a_line_says_goes_before_flags_and_those_before_the_model() -> None:
    llm = FakeLLM()
    lines = objects({"prompt": "a", "max_tokens": 3}, {"prompt": "b", "temperature": 0, "stop": ["x"]})
    assert len(list(PromptBatch(llm, {"max_tokens": 9, "top_p": 0.5}).run(lines))) == 2
    first, second = llm.seen
    assert (first.max_tokens, first.temperature, first.top_p, first.stop) == (3, 0.6, 0.5, ())
    assert (second.max_tokens, second.temperature, second.top_p, second.stop) == (9, 0.0, 0.5, ("x",))


def test_settings_reach_the_engine_and_sampling_flags_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeLLM] = []
    monkeypatch.setattr(hiserve, "LLM", lambda **settings: made.append(FakeLLM(**settings)) or made[0], raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    flags = ["folder", "--page-size", "4", "--max-tokens", "5", "--top-k", "3", "--stop", "x", "--stop", "y"]
    assert run(*flags)[0] == 0
    assert (made[0].settings["model"], made[0].settings["page_size"]) == ("folder", 4)
    (sampling,) = made[0].seen
    assert (sampling.max_tokens, sampling.top_k, sampling.stop) == (5, 3, ("x", "y"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ', "not valid JSON"),
        ("[1]", "not a JSON object"),
        ({}, "0 of them"),
        ({"prompt": "a", "token_ids": [1]}, "2 of them"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"token_ids": "abc"}, "token_ids must be a list"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "temperature": "hot"}, "float"),
        ({"prompt": "a", "top_p": 3}, "top_p is 3"),
        ({"prompt": "a" * 30}, "too long"),
    ],
)
def test_a_wrong_line_is_answered_in_its_place(line: Any, words: str) -> None:
    batch = PromptBatch(FakeLLM(), {})
    good = {"prompt": "ab"}
    results = list(batch.run(objects(line, good, line, line, good, line)))
    assert [result["index"] for result in results] == list(range(6))
    assert ["error" in result for result in results] == [True, False, True, True, False, True]
    assert ["choices" in result for result in results] == [False, True, False, False, True, False]
    assert words in results[0]["error"]["message"]
    assert batch.num_refused == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--input", "no/such/file"], "cannot read --input no/such/file"),
        (["--input", "/dev/null", "--output", "no/such/folder/x"], "cannot write --output"),
        (["--input", "/dev/null", "--top-p", "3"], "top_p is 3"),
        (["--input", "/dev/null", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_a_wrong_argument_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *argv]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_no_torch_before_the_engine_starts() -> None:
    program = "import sys\nimport hiserve.commands.generate\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wrong_sampling_flags_are_a_wrong_command_line() -> None:
    with pytest.raises(ConfigError, match="seed"):
        generate.PromptBatch(FakeLLM(), {"seed": 2**63})
