"""``hiserve generate --batch``: OpenAI's batch file, answered by the server's own routes; it can be continued, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hiserve import cli
from hiserve.commands import batch
from hiserve.commands.batch import answer_all
from hiserve.commands.batch_files import URLS, Results, read_lines
from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.errors import ConfigError, EngineError, OverloadedError, ResourceError, UnavailableError
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.routes import Endpoint
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.waiting import until
from tests.unit.server.conftest import REPLY, Server, make_server, reply_script, resolved

CHAT, COMPLETION, RESPONSES = URLS
MESSAGES = [{"role": "user", "content": "token"}]
LINE_BYTES = 2**20


def line(custom_id: Any, url: str = COMPLETION, method: str = "POST", **body: Any) -> str:
    asked = body or {"prompt": "token"}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": asked})


def found(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()] if path.exists() else []


class Folder:
    """A batch in a folder, answered by an application around a fake engine."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server, self.path = server, path
        self.output, self.errors = path / "out.jsonl", path / "out.errors.jsonl"
        self.num_read = 0

    async def run(self, *lines: str | bytes, room: int = 4, sleep: Any = asyncio.sleep) -> tuple[int, int]:
        """Returns how many replies and errors this run wrote."""
        file = self.path / "in.jsonl"
        file.write_bytes(b"".join((each if isinstance(each, bytes) else each.encode()) + b"\n" for each in lines))
        with file.open("rb") as opened, Results(self.output, self.errors) as results:
            await answer_all(self.server.app, self._counted(opened), results, room=room, sleep=sleep)
        return results.num_done, results.num_failed

    def _counted(self, file: Any) -> Iterator[tuple[int, bytes | None]]:
        for each in read_lines(file, LINE_BYTES):
            self.num_read += 1
            yield each

    def ids(self) -> list[str]:
        return sorted(each["custom_id"] for each in found(self.output))


@contextlib.asynccontextmanager
async def served(engine: FakeEngineClient, path: Path) -> AsyncIterator[Folder]:
    made = make_server(engine)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield Folder(made, path)


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    async with served(FakeEngineClient(script=lambda prompt: reply_script()), tmp_path) as made:
        yield made


async def test_each_url_is_answered_as_the_server_answers_it(folder: Folder) -> None:
    lines = line("chat", CHAT, messages=MESSAGES), line("text"), line("response", RESPONSES, input="token")
    assert await folder.run(*lines) == (3, 0)
    assert not folder.errors.exists()
    replies = {each["custom_id"]: each for each in found(folder.output)}
    for each in replies.values():
        assert each["id"].startswith("batch_req_") and each["error"] is None
        assert each["response"]["status_code"] == 200 and each["response"]["request_id"]
    bodies = {name: each["response"]["body"] for name, each in replies.items()}
    assert bodies["chat"]["choices"][0]["message"]["content"] == REPLY
    assert bodies["text"]["choices"][0]["text"] == REPLY
    assert bodies["response"]["output"][0]["content"][0]["text"] == REPLY
    assert len({each["id"] for each in replies.values()}) == 3


async def test_the_urls_are_routes_that_generate(folder: Folder) -> None:
    endpoints = [each for each in folder.server.app.routes if isinstance(each, Endpoint)]
    assert set(URLS) <= {each.path for each in endpoints if each.methods == {"POST"} and each.streams}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETION, b'{"prompt": 7}'),
        (COMPLETION, b'{"prompt": "a", "model": "another"}'),
        (COMPLETION, b'{"prompt": "a", "max_tokens": -1}'),
        (COMPLETION, b'{"prompt": "a", "max_tokens": 1e999}'),
        (COMPLETION, b'{"prompt": "\\ud800"}'),
        (COMPLETION, b'{"prompt": "a", "temperature": NaN}'),
        (COMPLETION, b'{"prompt": "%s"}' % (b"token " * 2000)),
        (COMPLETION, b"[]"),
        (COMPLETION, b"null"),
        (COMPLETION, b'"text"'),
        (COMPLETION, b"{}"),
        (CHAT, b'{"messages": %s1%s}' % (500 * b"[", 500 * b"]")),
        (CHAT, b'{"messages": [{"role": "king", "content": "a"}]}'),
        (RESPONSES, b'{"input": "a", "previous_response_id": "resp_0"}'),
        (RESPONSES, b'{"input": "a", "background": true}'),
    ],
)
async def test_a_refused_body_has_the_servers_own_refusal(folder: Folder, url: str, body: bytes) -> None:
    asked = b'{"custom_id": "x", "method": "POST", "url": "%s", "body": %s}' % (url.encode(), body)
    assert await folder.run(asked) == (0, 1)
    (refused,) = found(folder.errors)
    served = await folder.server.post(url, body)
    assert served.status in (400, 404)
    assert (refused["custom_id"], refused["error"]) == ("x", None)
    assert refused["response"]["status_code"] == served.status
    assert refused["response"]["body"] == served.json


@pytest.mark.parametrize(
    ("hostile", "custom_id", "words"),
    [
        ("not json", None, "not a JSON object"),
        ("[1]", None, "not a JSON object"),
        ("null", None, "not a JSON object"),
        (b"\xff\xfe", None, "not a JSON object"),
        (b"\x00", None, "not a JSON object"),
        (b"[" * 100_000, None, "not a JSON object"),
        (b'{"custom_id":' + b"[" * 100_000, None, "not a JSON object"),
        ("{}", None, "custom_id must be"),
        (line(7), None, "custom_id must be"),
        (line(None), None, "custom_id must be"),
        (line(""), None, "custom_id must be"),
        (line("x" * 513), None, "custom_id must be"),
        (line({"a": ["b"]}), None, "custom_id must be"),
        (
            b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
            None,
            "custom_id is not valid Unicode",
        ),
        (b'{"custom_id": NaN, "body": 1%s}' % (5000 * b"0"), None, "not a JSON object"),
        (line("x", method="GET"), "x", "method must be POST"),
        (line("x", method="post"), "x", "method must be POST"),
        (line("x", url="/v1/embeddings"), "x", "url must be one of"),
        (line("x", url="/flush_cache"), "x", "url must be one of"),
        (line("x", url="http://elsewhere/v1/completions"), "x", "url must be one of"),
        (line("x", url="/v1/completions?a=b"), "x", "url must be one of"),
        (b'{"custom_id": "x", "method": "POST", "url": ["/v1/completions"]}', "x", "url must be one of"),
        (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "x", "no body"),
        (line("x", prompt="a", stream=True), "x", "leave stream out"),
        (b'"%s"' % (LINE_BYTES * b"x"), None, "larger than"),
    ],
    ids=str,
)
async def test_a_hostile_line_is_told_with_its_number_and_costs_no_other(
    folder: Folder, hostile: str | bytes, custom_id: str | None, words: str
) -> None:
    assert await folder.run(line("before"), "", hostile, line("after")) == (2, 1)
    assert folder.ids() == ["after", "before"]
    (refused,) = found(folder.errors)
    assert (refused["custom_id"], refused["response"]) == (custom_id, None)
    assert words in refused["error"]["message"]
    assert refused["error"]["message"].startswith("line 3: "), "blank lines count"
    assert len(folder.server.engine.seen) == 2


async def test_a_custom_id_names_one_line(folder: Folder) -> None:
    assert await folder.run(line("a", prompt="token"), line("b"), line("a", prompt="other")) == (2, 1)
    assert folder.ids() == ["a", "b"]
    (refused,) = found(folder.errors)
    assert refused["custom_id"] == "a" and "that of an earlier line" in refused["error"]["message"]


async def test_a_second_run_answers_the_lines_without_a_reply(folder: Folder) -> None:
    """Those that failed are tried again; those that were answered are not."""
    lines = [line("a"), line("b", prompt=7), line("c"), "not json"]
    assert await folder.run(*lines) == (2, 2)
    first = folder.output.read_bytes()
    assert await folder.run(*lines, line("d")) == (1, 2)
    assert folder.output.read_bytes().startswith(first) and folder.ids() == ["a", "c", "d"]
    lines[1] = line("b")
    assert await folder.run(*lines[:3]) == (1, 0)
    assert folder.ids() == ["a", "b", "c", "d"]
    assert not folder.errors.exists(), "no line failed in the last run"
    assert len(folder.server.engine.seen) == 4


@pytest.mark.parametrize("num_left", [1, 5, 16, 40])
async def test_a_reply_that_was_cut_by_a_kill_is_made_again(folder: Folder, num_left: int) -> None:
    await folder.run(line("a"), line("c"))
    whole = folder.output.read_bytes()
    folder.output.write_bytes(whole + whole.replace(b'"a"', b'"b"')[:num_left])
    assert await folder.run(line("a"), line("b"), line("c")) == (1, 0)
    assert folder.output.read_bytes().startswith(whole) and folder.ids() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content", [b"notes\n", b"notes", line("a").encode() + b"\n", b"\xff\n", b"[" * 10**5 + b"\n", b"\n"]
)
async def test_a_file_of_something_else_is_left_as_it_is(folder: Folder, content: bytes) -> None:
    folder.output.write_bytes(content)
    folder.errors.write_bytes(b"kept")
    with pytest.raises(ConfigError, match="no results of a batch"):
        await folder.run(line("a"))
    assert folder.output.read_bytes() == content and folder.errors.read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["output", "errors"])
async def test_two_batches_do_not_write_one_file(folder: Folder, name: str) -> None:
    folder.errors.write_bytes(b"kept")
    with getattr(folder, name).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=rf"another batch writes .* Give another --{name}\."):
            await folder.run(line("a"))
    assert folder.errors.read_bytes() == b"kept"


async def test_a_device_is_no_output_and_is_not_removed(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        Results(Path("/dev/null"), folder.errors)
    sink = tmp_path / "sink"
    sink.symlink_to("/dev/null")
    with Results(folder.output, sink):
        pass
    assert sink.is_symlink()


async def test_so_many_lines_are_read_as_are_answered_at_once(folder: Folder) -> None:
    """A file of a million lines is never in memory."""
    go, engine = asyncio.Event(), folder.server.engine
    engine.step = lambda _: go.wait()
    running = asyncio.create_task(folder.run(*(line(f"{i}") for i in range(40)), room=8))
    await until(lambda: engine.num_inflight == 8)
    assert folder.num_read == 9
    go.set()
    assert await running == (40, 0)
    assert folder.ids() == sorted(map(str, range(40)))


async def test_room_of_bodies_that_are_answered_is_given_back() -> None:
    window = batch._Window(8)
    await window.enter(batch.MAX_BYTES)
    waiting = asyncio.create_task(window.enter(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    window.leave(batch.MAX_BYTES)
    other = asyncio.create_task(window.enter(1))
    for _ in range(4):
        await asyncio.sleep(0)
    assert waiting.done() and other.done()


def test_the_rest_of_a_long_line_is_no_line() -> None:
    long = b"x" * 35
    assert list(read_lines(io.BytesIO(b"y" * 10 + b"\n" + long + b"\n\nok\n" + long), 10)) == [
        (1, b"y" * 10), (2, None), (4, b"ok"), (5, None)
    ]  # fmt: skip


async def test_each_line_is_counted_once(folder: Folder) -> None:
    lines = [line("a"), line("b", prompt=7), "not json", line("a")]
    for _ in range(2):
        counted = Counter[str]()
        with Results(folder.output, folder.errors) as results:
            numbered = enumerate((each.encode() for each in lines), 1)
            await answer_all(folder.server.app, numbered, results, room=4, advance=partial(counted.update, ["line"]))
        assert counted["line"] == len(lines)


async def test_large_bodies_are_answered_one_after_another(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_BYTES", 100)
    go, engine = asyncio.Event(), folder.server.engine
    engine.step = lambda _: go.wait()
    running = asyncio.create_task(folder.run(*(line(f"{i}", prompt="token", user="x" * 80) for i in range(3))))
    await until(lambda: engine.num_inflight == 1)
    assert folder.num_read == 2
    go.set()
    assert await running == (3, 0)


async def test_a_request_without_room_waits_as_long_as_the_server_says(tmp_path: Path) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), fail_at=0)
    engine.failure = OverloadedError("full", retry_after_s=7)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            engine.fail_at = None

    async with served(engine, tmp_path) as folder:
        await folder.run(line("a"), sleep=sleep)
    assert waits == [7.0, 7.0, 7.0] and folder.ids() == ["a"]


async def test_one_that_never_finds_room_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), fail_at=0, failure=OverloadedError("full"))
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with served(engine, tmp_path) as folder:
        await folder.run(line("a"), line("b", prompt=7), sleep=sleep)
    assert len(waits) == batch.TRIES - 1
    assert sorted(each["response"]["status_code"] for each in found(folder.errors)) == [400, 429]


async def test_without_an_engine_the_batch_ends_and_can_be_continued(tmp_path: Path) -> None:
    """Otherwise a million lines would each be told so."""
    engine = FakeEngineClient(script=lambda prompt: reply_script(), fail_at=0, failure=UnavailableError("it died"))

    async def sleep(_: float) -> None:
        pass

    async with served(engine, tmp_path) as folder:
        with pytest.raises(UnavailableError, match="it died The same command continues the batch"):
            await folder.run(line("a"), sleep=sleep)
    assert found(folder.errors) == []


@pytest.mark.parametrize("failure", [EngineError("cursed"), ZeroDivisionError("ours")])
async def test_a_request_that_fails_is_an_error_of_its_line(
    tmp_path: Path, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), fail_at=0, failure=failure)
    async with served(engine, tmp_path) as folder:
        await folder.run(line("a"))
    (refused,) = found(folder.errors)
    assert refused["response"]["status_code"] == 500
    assert ("ZeroDivisionError: ours" in caplog.text) == isinstance(failure, ZeroDivisionError)


async def test_a_full_disk_ends_the_batch(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with Results(folder.output, folder.errors) as results:
        with open("/dev/full", "wb", buffering=0) as full:
            monkeypatch.setattr(results, "_output", full)
            with pytest.raises(ResourceError, match=r"No space left on device\. The same command continues"):
                results.add_reply("a", 200, "r", b"{}")
        assert results.num_done == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch", "in"], "needs --output"),
        (["--batch", "no/such", "--output", "out"], "cannot read --batch no/such"),
        (["--batch", "in", "--output", "no/such/out"], "cannot write no/such/out"),
        (["--batch", "in", "--output", "in"], "must be three files"),
        (["--batch", "in", "--output", "out", "--errors", "./out"], "must be three files"),
        (["--batch", "in", "--output", "out", "--errors", "hard"], "must be three files"),
        (["--batch", "in", "--output", "soft"], "must be three files"),
        (["--batch", "in", "--output", "loop"], "cannot write loop: Too many levels"),
        (["--batch", "in", "--output", "out", "--input", "x"], "--input is not for --batch"),
        (["--batch", "in", "--output", "out", "--max-tokens", "4"], "--max-tokens is not for --batch"),
        (["--batch", "in", "--output", "out", "--stop", "x"], "--stop is not for --batch"),
        (["--errors", "x"], "--errors is for --batch"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("x")
    Path("hard").hardlink_to("in")
    Path("soft").symlink_to("in")
    Path("loop").symlink_to("loop")
    assert cli.main(["generate", *argv]) == 1
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
    assert not Path("out").exists() and Path("in").read_text() == "x"


def assembled(monkeypatch: pytest.MonkeyPatch, **server: Any) -> list[tuple[Options, FakeEngineClient]]:
    """Gives the command a server around a fake engine; returns the options and the engine of each run."""
    made: list[tuple[Options, FakeEngineClient]] = []

    def assemble(options: Options) -> tuple[Any, EngineHandle, Settings]:
        engine = FakeEngineClient(script=lambda prompt: reply_script())
        made.append((options, engine))
        settings = {"api_key": options.server.api_key, **server}
        built = make_server(engine, **settings)
        return built.app, built.handle, resolved(**settings).settings

    monkeypatch.setattr(batch, "assemble", assemble)
    return made


def test_a_batch_gives_the_copies_of_the_cache_the_time_of_a_server_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = assembled(monkeypatch, drain_timeout_s=17.0)
    (tmp_path / "in.jsonl").write_text(line("a"))
    assert cli.main(["generate", "--batch", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    ((_, engine),) = made
    assert (engine.stopped, engine.copy_s) == (1, 17.0)


def test_a_body_may_be_as_large_as_for_the_server_in_a_line_that_is_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2000
    assembled(monkeypatch, max_request_bytes=most)
    size = len(json.dumps({"prompt": "token", "user": ""}))
    bodies = [{"prompt": "token", "user": "x" * (most - size + more)} for more in (0, 1)]
    lines = [line(f"{more}" + "i" * 500, **body) for more, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, line("rest")]))
    assert cli.main(["generate", "--batch", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 1
    assert sorted(each["custom_id"][0] for each in found(tmp_path / "out.jsonl")) == ["0", "r"]
    (refused,) = found(tmp_path / "out.errors.jsonl")
    assert refused["custom_id"][0] == "1" and refused["response"]["status_code"] == 413


def test_the_command_asks_for_no_keys_stores_nothing_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tests/test_readme.py`` runs it with the embedded model."""
    made = assembled(monkeypatch)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join([line("a"), line("b", prompt=7), line("c", CHAT, messages=MESSAGES)]))
    config = tmp_path / "config.yaml"  # of a server
    config.write_text("api_key: [secret]\nadmin_api_key: more\n")
    argv = ["generate", "--batch", str(file), "--output", str(out), "--config", str(config)]
    assert cli.main(argv) == 1
    errors = tmp_path / "out.errors.jsonl"
    assert capsys.readouterr().err == f"2 replies added to {out}, 1 errors written to {errors}\n"
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "in.jsonl", "out.errors.jsonl", "out.jsonl"]
    (server,) = (options.server for options, _ in made)
    assert (server.api_key, server.admin_api_key, server.responses_store) == ((), None, "off")
    file.write_text(line("a"))
    assert cli.main(argv) == 0
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "in.jsonl", "out.jsonl"]
