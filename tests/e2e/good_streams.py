"""Streams that must not change and processes that must lose nothing while malformed requests arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.live import Live
from tests.helpers.bad_requests import CHAT, MAX_MODEL_LEN, MAX_REQUEST_BYTES, TEXT
from tests.helpers.bad_wire import Ending, Wire
from tests.helpers.error_shape import fault_of_error
from tests.helpers.processes import is_alive
from tests.helpers.waiting import PATIENCE_S, wait_until

LEAST_STREAMS = 4
ANSWER_S = PATIENCE_S
# Double precision, so that a token does not depend on what else is in its batch.
FLAGS = ("--dtype", "float64", "--cpu-threads", "1", "--kv-pages", "1000", "--max-model-len", str(MAX_MODEL_LEN))
LIMITS = ("--max-request-bytes", str(MAX_REQUEST_BYTES), "--log-level", "warning")
SAMPLED = {"temperature": 1.0, "top_p": 0.9}
LONG = {"max_tokens": 60, "ignore_eos": True, "stream": True, "return_token_ids": True}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "Would you like", "temperature": 0, **LONG}),
    (TEXT, {"prompt": list(range(100, 160)), "temperature": 0, **LONG}),
    (TEXT, {"prompt": "I need a ride", "seed": 1, **SAMPLED, **LONG}),
    (TEXT, {"prompt": "Two coffees, please.", "seed": 2, "n": 2, "presence_penalty": 1, **SAMPLED, **LONG}),
    (CHAT, {"messages": [{"role": "user", "content": "Find me a hotel."}], "temperature": 0, **LONG}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello there."}], "seed": 3, **SAMPLED, **LONG}),
]
NUM_STREAMS = len(STREAMS)
Quiet = list[dict[int, list[int]]]  # tokens of each stream by choice


class GoodStreams:
    """Streams that run again and again, each compared with what it was when nothing else ran.

    Args:
        http: Client of the server.
        quiet: What they must be.
    """

    def __init__(self, http: httpx.AsyncClient, quiet: Quiet) -> None:
        self._http = http
        self._quiet = quiet
        self._num_open = 0
        self._is_over = False
        self.num_compared = 0

    async def run(self, index: int) -> None:
        """Repeats one stream until ``end``."""
        while not self._is_over:
            tokens = await self.once(index)
            assert tokens == self._quiet[index], f"stream {index} changed: {difference(tokens, self._quiet[index])}"
            self.num_compared += 1

    async def once(self, index: int) -> dict[int, list[int]]:
        """Returns the tokens of one stream by choice."""
        path, body = STREAMS[index]
        tokens: dict[int, list[int]] = {}
        async with self._http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self._num_open += not tokens
                        tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        self._num_open -= 1
        return tokens

    async def enough(self) -> None:
        """Returns when enough streams have begun and not ended."""
        while self._num_open < LEAST_STREAMS:
            await asyncio.sleep(0.001)

    def end(self) -> None:
        """Lets each stream come to its end."""
        self._is_over = True


def difference(tokens: dict[int, list[int]], quiet: dict[int, list[int]]) -> str:
    """Says where the choices of a stream are not what they were."""
    told = []
    for choice in sorted({*tokens, *quiet}):
        got, wanted = tokens.get(choice, []), quiet.get(choice, [])
        same = next((at for at, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other), len(got))
        told.append(f"choice {choice}: {len(got)} tokens of {len(wanted)}, the same to {same}")
    return "; ".join(told)


async def exchange(url: str, wire: Wire) -> bytes:
    """Sends the bytes as the case says and returns everything that came back."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(65536):
                answer.extend(piece)

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(ANSWER_S):
            pieces = [wire.raw[start : start + 32768] for start in range(0, len(wire.raw), 32768)]
            for piece in pieces[:-1]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(pieces[-1] if pieces else b"")
            if wire.ending is Ending.HALF:  # at once, so that the server reads both together
                writer.write_eof()
            if wire.ending is Ending.CUT:
                await asyncio.sleep(0.02)
                writer.transport.abort()
            await reading
    finally:
        reading.cancel()
        writer.transport.abort()
    return bytes(answer)


def answers(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields status and body of each answer; the last one may be cut."""
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        size = int(length[1]) if length else 0 if status == 100 else len(raw)
        if status != 100:
            yield status, raw[:size]
        raw = raw[size:]


def fault(wire: Wire, raw: bytes) -> str | None:
    """Says what is wrong with the answers, if something is."""
    got = list(answers(raw))
    if wire.ending is Ending.CUT:
        return None
    if len(got) > len(wire.answers) or (wire.ending is Ending.STAY and len(got) != len(wire.answers)):
        return f"{len(got)} answers: {raw[:200]!r}"
    for (status, body), wanted in zip(got, wire.answers, strict=False):
        if status != wanted.status:
            return f"{status}, not {wanted.status}: {body[:200]!r}"
        if status != 200:
            error = json.loads(body)["error"]
            if "code" not in error:  # Anthropic's form
                is_told = error["type"] == wanted.code and error["message"].startswith(wanted.param or "")
            else:
                is_told = (error["code"], error["param"]) == (wanted.code, wanted.param)
            if not is_told:
                return f"{error}, not {wanted}"
            if told := fault_of_error(status, body):
                return told
    return None


def warm(live: Live) -> None:
    """Asks for a reply under a grammar, after which the process that tries grammars out stays, and waits for rest."""
    body = {"prompt": "Hi", "max_tokens": 1, "regex": "a"}
    httpx.post(f"{live.url}{TEXT}", json=body, timeout=ANSWER_S).raise_for_status()
    live.wait_idle()


class Belongings:
    """What the server's processes hold, to be compared with what they hold later."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pids = live.pids()
        self._files = self._num_files()

    def check(self) -> None:
        """Fails unless the server is idle, whole, and holds what it held."""
        (worker,) = self._live.wait_idle()["workers"]
        stats = worker["stats"]
        assert stats["free_pages"] + stats["evictable_pages"] == worker["num_pages"]
        assert self._live.pids() == self._pids
        assert all(is_alive(pid) for pid in self._pids)
        wait_until(
            lambda: all(now <= before for now, before in zip(self._num_files(), self._files, strict=True)),
            lambda: f"{self._num_files()} open files, {self._files} before: {open_files(self._pids[0])}",
        )
        check_log(self._live)

    def _num_files(self) -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in self._pids]


def open_files(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(path))
    return found


def check_log(live: Live) -> None:
    """Fails if the server complained of anything but its clients."""
    alarming = re.findall(r"Traceback.*|.*\b(?:ERROR|CRITICAL)\b.*|.*never retrieved.*", Path(live.log).read_text())
    assert not alarming, Path(live.log).read_text()[-4000:]
