"""CPU time of the API process for one reading of the dashboard, which reads once a second.

Usage: ``python -m benchmarks.dashboard``. The server is a process of its own with the tests' fake engine; 256 rows run, 250 steps end
in a second, the tree has 200 nodes. The engine's answers are decoded as they arrive from the scheduler. Readings ask what the page asks, over HTTP: in turns
with idle spells of the same length, whose CPU time is taken off. Bar: a reading a second costs 2 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import httpx
import uvicorn
import uvloop

from benchmarks.record import RESULTS, Record, judge, spread
from benchmarks.served import thread_cpu_s
from hiserve.ipc.cache_stats import NodeFacts
from hiserve.ipc.codec import MessageDecoder, encode
from hiserve.ipc.messages import ToClient, Watched
from hiserve.ipc.watching import RowFacts, StepRecord, Subject, WorkerView
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import make_server

NUM_ROWS, NUM_STEPS, NUM_NODES = 256, 250, 200
CODE = ("hiserve/server/management", "hiserve/server/metrics", "hiserve/ipc/watching.py", "benchmarks/dashboard.py")
BAR = 0.02  # of a core
READINGS = 30  # of a round: one asks for the server's information, every third for the tree


def view(subject: Subject, since_s: float) -> WorkerView:
    """Returns the rows, or the steps of a second after ``since_s``."""
    end_s = since_s + 1.0
    rows = [
        RowFacts(row, 10**6 + row, "decode", 3000, 2048, "host", 3400, 401, 600, 213, 0, False, 500, 400)
        for row in range(1, NUM_ROWS + 1)
    ]
    steps = [
        StepRecord(
            *(step, end_s - (NUM_STEPS - step) / NUM_STEPS - 0.0039, end_s - (NUM_STEPS - step) / NUM_STEPS),
            *(NUM_ROWS, NUM_ROWS, 0, NUM_ROWS, 0, 0, "replay", "decode", 0.0, 1, ""),
        )
        for step in range(NUM_STEPS)
    ]
    return WorkerView(0, 1, end_s, rows, []) if subject == "rows" else WorkerView(0, 1, end_s, [], steps)


class Engine(FakeEngineClient):
    """Answers from frames."""

    async def watch(self, subject: Subject, since_s: float = 0.0) -> list[WorkerView]:
        if subject not in self._frames:
            self._frames[subject] = encode(Watched(1, [view(subject, 0.0)]))
        message = self._decoder.decode(self._frames[subject]).message
        assert isinstance(message, Watched)
        return message.views

    def __post_init__(self) -> None:
        super().__post_init__()
        self._frames: dict[Subject, list[bytes]] = {}
        self._decoder = MessageDecoder[ToClient](ToClient)
        root = "ab" * 8
        self.nodes = [NodeFacts(root, "", 0, 0, "", 9, 0, 100, NUM_NODES - 1)]
        self.nodes += [NodeFacts(f"{i:016x}", root, 1, 64, "DH", 1, 0, i, 0) for i in range(1, NUM_NODES)]


async def run(pipe: Connection) -> None:
    """Serves until the process is ended."""
    made = make_server(Engine(script=lambda prompt: []))
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        server = uvicorn.Server(uvicorn.Config(made.app, port=0, log_level="warning", lifespan="off", access_log=False))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await serving


def start(pipe: Connection) -> None:
    uvloop.run(run(pipe))


def round_of(http: httpx.Client, pid: int) -> float:
    """Returns the CPU seconds of a reading, those of an idle process in the same time taken off."""
    begin_s, begin = time.monotonic(), thread_cpu_s(pid)
    for reading in range(READINGS):
        paths = ["metrics", "cache/stats", "debug/rows", "debug/steps?since=0.000000"]
        paths += ["cache/tree?depth=4"] * (reading % 3 == 0) + ["server_info"] * (reading == 0)
        for path in paths:
            http.get(path).raise_for_status()
    took_s, used = time.monotonic() - begin_s, thread_cpu_s(pid) - begin
    begin = thread_cpu_s(pid)
    time.sleep(took_s)
    return (used - (thread_cpu_s(pid) - begin)) / READINGS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print and write nothing")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=start, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ours.recv()}", timeout=60) as http:
            round_of(http, process.pid)  # warms it up
            rounds = [round_of(http, process.pid) for _ in range(options.rounds)]
    finally:
        process.terminate()
        process.join()
    share = statistics.median(rounds)
    median, low, high = spread([1e3 * each for each in rounds])
    print(f"{median:.2f} ms of CPU a reading ({low:.2f} to {high:.2f}), {len(rounds)} rounds of {READINGS} readings")
    if options.dry:
        return 0
    record = Record(RESULTS / "dashboard.json", "python -m benchmarks.dashboard", *CODE)
    record |= {"rows": NUM_ROWS, "steps": NUM_STEPS, "nodes": NUM_NODES, "bar": BAR}
    record |= {"core_share": round(share, 5), "ms_of_a_reading": [round(1e3 * each, 3) for each in rounds]}
    record.save()
    return int(bool(judge({"core share": share}, most={"core share": BAR})))


if __name__ == "__main__":
    sys.exit(main())
