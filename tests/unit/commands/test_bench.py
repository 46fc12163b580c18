"""``hiserve bench`` from its command line: against scripted servers, the real application, and the offline API."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hiserve
from hiserve import cli
from hiserve.commands import bench, serve
from hiserve.config.options import make_options
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.fake_server import CARD, COMPLETIONS, Asked, FakeServer, Handler, Out, scripted
from tests.helpers.running import Running
from tests.helpers.slowness import slowness
from tests.unit.server.conftest import make_server, reply_script

ROOT = Path(__file__).parents[3]


async def bench_cli(*argv: str) -> int:
    """Runs the command line beside the server of this test."""
    return await asyncio.to_thread(cli.main, ["bench", *argv])


@asynccontextmanager
async def serving(handler: Handler, path: str = COMPLETIONS, **card: Any) -> AsyncIterator[FakeServer]:
    async with FakeServer({path: handler}, {**CARD, **card}) as server:
        yield server


def random_load(server: FakeServer, *more: str) -> list[str]:
    sizes = ["--num-prompts", "6", "--input-length", "5", "--output-length", "3", "--vocab-size", "50"]
    return ["serve", "--url", server.url, *sizes, *more]


async def test_scripted_delays_come_out_as_figures(tmp_path: Path, capsys: Any) -> None:
    output, plot = tmp_path / "a" / "run.json", tmp_path / "run.png"
    async with serving(scripted(0.1, 0.05, 0.05)) as server:
        argv = ["--max-concurrency", "3", "--goodput", "ttft:150", "tpot:10", "--output", str(output)]
        assert await bench_cli(*random_load(server, *argv, "--plot", str(plot))) == 0
        assert server.most_open == 3
        measured = [asked for asked in server.asked if asked.path == COMPLETIONS][1:]
    found = json.loads(output.read_bytes())
    summary = found["summary"]
    assert summary["ttft_ms"]["median"] == pytest.approx(100, abs=40)
    assert summary["tpot_ms"]["median"] == pytest.approx(50, abs=20)
    assert summary["itl_token_ms"]["count"] == 12
    assert summary["duration_s"] == pytest.approx(0.4, abs=0.15)
    assert (summary["num_ok"], summary["num_output"], summary["num_cached"], summary["peak_in_flight"]) == (6, 18, 6, 3)
    assert found["goodput"]["attainment_of"] == {"ttft": 1.0, "tpot": 0.0}
    assert [len(each["chunk_ms"]) for each in found["samples"]] == [3] * 6
    assert found["server"] == {"model": "fake", "max_model_len": 1000, "vocab_size": 50} | dict.fromkeys(
        ("version", "device", "page_size")
    )
    assert {"date", "hardware", "versions", "command", "tool"} <= set(found)
    assert plot.stat().st_size > 20_000
    assert {len(asked.body["prompt"]) for asked in measured} == {5}
    assert all(asked.body["ignore_eos"] and asked.body["max_tokens"] == 3 for asked in measured)
    out = capsys.readouterr().out
    for words in ("6 of 6", "TTFT (first token)", "ITL per token", "tokens/s", "6 (33.3%)", "0 (0.0%)"):
        assert words in out, words


async def test_the_warm_up_is_one_request_that_shares_nothing_and_comes_before_the_flush() -> None:
    async def flushed(_: Asked, out: Out) -> None:
        await out.json(200, {})

    async with serving(scripted(0.0)) as server:
        server.routes["/flush_cache"] = flushed
        assert await bench_cli(*random_load(server, "--flush-cache")) == 0
        told = [path for path in server.paths() if path in (COMPLETIONS, "/flush_cache")]
        assert told == [COMPLETIONS, "/flush_cache", *[COMPLETIONS] * 6]
        prompts = [asked.body["prompt"] for asked in server.asked if asked.path == COMPLETIONS]
        assert prompts[0] == prompts[1][::-1]


async def test_the_same_seed_sends_the_same_prompts() -> None:
    async with serving(scripted(0.0)) as server:
        for seed in ("1", "1", "2"):
            server.asked.append(Asked("", "mark", {}, None, 0))
            await bench_cli(*random_load(server, "--seed", seed))
        runs: list[list[Any]] = []
        for asked in server.asked:
            if asked.path == "mark":
                runs.append([])
            elif asked.path == COMPLETIONS:
                runs[-1].append(asked.body["prompt"])
    assert sorted(runs[0]) == sorted(runs[1]) != sorted(runs[2])


async def test_failures_are_shown_and_only_a_run_without_success_is_a_failure(tmp_path: Path, capsys: Any) -> None:
    count = 0

    async def handle(asked: Asked, out: Out) -> None:
        nonlocal count
        count += 1
        if count in (3, 4):
            await out.json(503, {"error": {"message": "too [busy]"}})
        elif count == 5 or count > 7:
            await out.drop()
        else:
            await scripted(0.0)(asked, out)

    output = tmp_path / "run.json"
    async with serving(handle) as server:
        argv = random_load(server, "--output", str(output), "--max-concurrency", "1")
        assert await bench_cli(*argv) == 0
        found = json.loads(output.read_bytes())
        assert found["summary"]["errors"] == {"http 503": 2, "connection": 1}
        assert [each["error"] for each in found["samples"]].count("") == 3
        out = capsys.readouterr().out
        assert "3 of 6" in out and "failed: http 503" in out and "2 × http 503: too [busy]" in out
        assert await bench_cli(*argv) == 1  # even the warm-up fails now
        assert "warm-up request failed: connection" in capsys.readouterr().err
        count = 1
        server.routes[COMPLETIONS] = fails_after_warm_up()
        assert await bench_cli(*argv) == 1
        assert "0 of 6" in capsys.readouterr().out


def fails_after_warm_up() -> Handler:
    asked_before: list[Asked] = []

    async def handle(asked: Asked, out: Out) -> None:
        asked_before.append(asked)
        if len(asked_before) == 1:
            await scripted(0.0)(asked, out)
        else:
            await out.json(500, {})

    return handle


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--dataset", "chats"], "give --path"),
        (["serve", "--dataset", "agent-sessions", "--path", "x", "--request-rate", "2"], "--speed"),
        (["serve", "--goodput", "ttft"], "no objective"),
        (["serve", "--input-length", "2000", "--vocab-size", "9"], "context is 1000"),
        (["serve", "--model-name", "other"], "no model 'other'"),
        (["serve", "--api-key-file", "/nowhere/key"], "--api-key-file"),
        (["serve", "--backend", "openai-chat", "--vocab-size", "9", "--input-length", "9"], "--output-length"),
        (["serve"], "--vocab-size"),
        (["serve", "--output", "/proc/no/run.json"], "cannot write --output"),
        (["multiturn", "--num-rounds", "600", "--vocab-size", "9", "--request-length", "1"], "context is 1000"),
        (["serve", "--num-prompt", "5"], "unknown argument '--num-prompt'"),
        (["serve", "--page-size", "5"], "unknown argument"),
    ],
)
async def test_what_cannot_be_run_is_one_line_that_says_what_to_do(argv: list[str], words: str, capsys: Any) -> None:
    async with serving(scripted(0.0)) as server:
        url = ["--url", server.url]
        if words == "--output-length":
            argv, words = [*argv, "--output-length", "3"], "takes no token ids"
        assert await bench_cli(*argv, *url) == 1
    err = capsys.readouterr().err
    assert err.startswith("hiserve: ") and err.count("\n") == 1
    assert words in err


async def test_a_benchmark_that_fails_leaves_no_empty_file_and_keeps_an_older_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    async with serving(scripted(0.0)) as server:
        for output in (new, old):
            argv = ["serve", "--url", server.url, "--model-name", "other", "--output", str(output)]
            assert await bench_cli(*argv) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "{}"


async def test_no_kind_is_told_what_kinds_there_are(capsys: Any) -> None:
    assert await bench_cli() == 1
    assert "KIND" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(kind in out for kind in bench.KINDS)


# --- the real application ---------------------------------------------------------------------


@asynccontextmanager
async def application() -> AsyncIterator[tuple[FakeEngineClient, str]]:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script(), cached=2))
    running = Running(made)
    try:
        await running.ready()
        yield made.engine, serve.url_of(running.listener)
    finally:
        await running.stop()


async def test_random_prompts_against_the_real_application(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    async with application() as (engine, url):
        sizes = ["--num-prompts", "5", "--input-length", "9", "--output-length", "8"]
        assert await bench_cli("serve", "--url", url, *sizes, "--output", str(output)) == 0
    summary = json.loads(output.read_bytes())["summary"]
    num_output = 5 * len(reply_script())
    assert (summary["num_ok"], summary["num_prompt"], summary["num_output"]) == (5, 45, num_output)
    assert summary["num_cached"] == 10
    assert summary["has_usage"]
    assert summary["itl_token_ms"]["count"] == num_output - 5
    assert len(engine.seen) == 6
    assert all(seen.finished for seen in engine.seen)


async def test_chats_against_the_real_application(tmp_path: Path) -> None:
    path, output = tmp_path / "chats.jsonl", tmp_path / "run.json"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text(json.dumps({"messages": [*talk, {"role": "user", "content": "Bye"}]}) + "\n")
    async with application() as (_, url):
        argv = ["serve", "--url", url, "--dataset", "chats", "--path", str(path), "--output", str(output)]
        assert await bench_cli(*argv) == 0
    found = json.loads(output.read_bytes())
    assert found["backend"] == "openai-chat"
    assert [(each["session"], each["turn"], each["error"]) for each in found["samples"]] == [(0, 0, ""), (0, 1, "")]


async def test_chats_in_rounds_carry_the_replies_of_the_real_application(tmp_path: Path, capsys: Any) -> None:
    output, plot = tmp_path / "run.json", tmp_path / "run.png"
    async with application() as (engine, url):
        argv = ["--num-clients", "2", "--num-rounds", "3", "--request-length", "5", "--output-length", "12"]
        files = ["--output", str(output), "--plot", str(plot)]
        assert await bench_cli("multiturn", "--url", url, *argv, *files) == 0
        chats: dict[tuple[int, ...], list[list[int]]] = {}
        for seen in engine.seen[1:]:
            chats.setdefault(tuple(seen.prompt[:5].tolist()), []).append(seen.prompt.tolist())
    reply = [index for ids in reply_script() for index in ids]
    assert [len(rounds) for rounds in chats.values()] == [3, 3]
    for rounds in chats.values():
        rounds.sort(key=len)
        for before, after in itertools.pairwise(rounds):
            assert after[: len(before) + len(reply)] == before + reply
            assert len(after) == len(before) + len(reply) + 5
    found = json.loads(output.read_bytes())
    assert [each["num_ok"] for each in found["rounds"]] == [2, 2, 2]
    assert found["rounds"][2]["num_known"] == 2 * (2 * (5 + len(reply)) // 16 * 16), "whole pages"
    assert found["replies_without_ids"] == 0
    assert "hit rate" in " ".join(capsys.readouterr().out.split())
    assert plot.exists()


# --- offline ----------------------------------------------------------------------------------


def test_offline_measures_the_engine_with_its_settings(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "run.json"
    sizes = ["--num-prompts", "3", "--input-length", "20", "--output-length", "4", "--random-range-ratio", "0.5"]
    argv = ["bench", "offline", *sizes, "--in-process", "--kv-pages", "64", "--cpu-threads", "1", "--api-key", "k3y"]
    assert cli.main([*argv, "--output", str(output)]) == 0
    found = json.loads(output.read_bytes())
    assert found["config"]["cache"]["kv_pages"] == 64
    assert "k3y" not in json.dumps(found["config"])
    lengths = found["summary"]["lengths"]
    assert all(10 <= num_input <= 30 and 2 <= num_output <= 6 for num_input, num_output in lengths)
    assert found["summary"]["num_output"] == sum(num_output for _, num_output in lengths)
    assert "offline on hiserve-nano" in capsys.readouterr().out


class FakeLLM:
    """Answers every prompt with four tokens.

    Args:
        seen: Takes the settings that it is made with, and the largest token that it is asked about.
        settings: Those.
    """

    settings = make_options(max_model_len=100)

    def __init__(self, seen: dict[str, Any], settings: dict[str, Any]) -> None:
        seen.update(settings)
        self._seen = seen

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        self._seen["tokens"] = max(map(max, prompts))
        reply = SimpleNamespace(token_ids=[1] * 4)
        return [SimpleNamespace(prompt_token_ids=prompt, outputs=[reply], num_cached_tokens=0) for prompt in prompts]

    def generate_each(self, requests: Iterable[tuple[list[int], Any]]) -> Iterator[Any]:
        for index, (prompt, sampling) in enumerate(requests):
            if index == self._seen.get("interrupted_at"):
                raise KeyboardInterrupt
            yield from self.generate([prompt], sampling)


def test_offline_runs_a_built_in_shape_with_prompts_of_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(hiserve, "LLM", lambda **settings: FakeLLM(seen, settings), raising=False)
    shape = ["--shape", "llama-8b", "--load-format", "dummy", "--in-process", "--graphs", "off"]
    sizes = ["--num-prompts", "8", "--input-length", "40", "--output-length", "4"]
    assert cli.main(["bench", "offline", *shape, *sizes]) == 0
    assert (seen["shape"], seen["load_format"], seen["in_process"], seen["graphs"]) == (
        "llama-8b",
        "dummy",
        True,
        "off",
    )
    assert 100_000 < seen["tokens"] < 128_256


async def test_ctrl_c_ends_a_run_with_what_was_measured(tmp_path: Path) -> None:
    output, arrived = tmp_path / "run.json", asyncio.Event()
    answered = scripted(0.0, 0.0, 0.0)
    num_asked = 0

    async def half_of_them(asked: Asked, out: Out) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1 + 3:  # after the warm-up and three
            arrived.set()
            await asyncio.Event().wait()
        await answered(asked, out)

    async with serving(half_of_them) as server:
        argv = random_load(server, "--max-concurrency", "1", "--output", str(output))
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hiserve.cli", "bench", *argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        await asyncio.wait_for(arrived.wait(), 60)
        child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    assert child.returncode == 130, err.decode()
    assert "stopped early: 4 of 6 requests were sent" in out.decode()
    found = json.loads(output.read_bytes())
    assert (found["summary"]["num_ok"], found["summary"]["errors"], found["unsent_requests"]) == (
        3,
        {"interrupted": 1},
        2,
    )


@pytest.mark.parametrize("at", [0, 3])
def test_ctrl_c_ends_an_offline_run_with_what_was_measured(
    at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(hiserve, "LLM", lambda **settings: FakeLLM({"interrupted_at": at}, settings), raising=False)
    output = tmp_path / "run.json"
    sizes = ["--num-prompts", "8", "--input-length", "40", "--output-length", "4"]
    assert cli.main(["bench", "offline", *sizes, "--output", str(output)]) == 130
    if at:
        assert json.loads(output.read_bytes())["summary"]["num_requests"] == 3
        assert "offline on hiserve-nano" in capsys.readouterr().out


def test_offline_requests_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(hiserve, "LLM", lambda **settings: FakeLLM({}, settings), raising=False)
    assert cli.main(["bench", "offline", "--input-length", "90", "--output-length", "11", "--num-prompts", "2"]) == 1
    assert "takes 101 tokens" in capsys.readouterr().err


# --- what it costs ----------------------------------------------------------------------------


def test_loading_the_load_generator_loads_no_torch_and_no_matplotlib() -> None:
    program = (
        "import sys, hiserve.commands.bench\n"
        "heavy = {'torch', 'triton', 'transformers', 'matplotlib', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


EVEN_STREAMS = """
import asyncio, time
from tests.helpers.fake_server import COMPLETIONS, FakeServer, finish_event, text_event

async def even(asked, out):
    await out.begin()
    begin = time.perf_counter()
    for number in range(1, asked.body["max_tokens"] + 1):
        await out.event(text_event(" word", number, prompt=8, cached=0))
        await asyncio.sleep(begin + number * 0.032 - time.perf_counter())
    await out.event(finish_event())
    await out.end()

async def main():
    async with FakeServer({COMPLETIONS: even}) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_thousand_chunks_a_second_take_a_small_part_of_a_core(tmp_path: Path) -> None:
    """At 6c1090c they took 1.6 % of one; the bar is 10 %."""
    output = tmp_path / "run.json"
    with subprocess.Popen([sys.executable, "-c", EVEN_STREAMS], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            sizes = ["--num-prompts", "32", "--input-length", "8", "--output-length", "62", "--vocab-size", "100"]
            before = resource.getrusage(resource.RUSAGE_SELF)
            argv = ["bench", "serve", "--url", url, *sizes, "--request-rate", "1000", "--output", str(output)]
            assert cli.main(argv) == 0
            after = resource.getrusage(resource.RUSAGE_SELF)
        finally:
            server.terminate()
    summary = json.loads(output.read_bytes())["summary"]
    assert summary["num_output"] == 32 * 62
    slow = slowness()
    assert summary["client_cpu_share"] < 0.1 * slow
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0 * slow
