"""Malformed requests and whatever the schema allows or forbids, for as long as you like, beside good streams.

No answer of 500 or 502, the same processes to the end, nothing left behind, and no good stream changes by a token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.fuzzing import CHECKS, COMMAND, CONFIG, num_cases, num_tested
from tests.e2e.good_streams import (
    ANSWER_S,
    FLAGS,
    LIMITS,
    NUM_STREAMS,
    Belongings,
    GoodStreams,
    Quiet,
    exchange,
    fault,
    warm,
)
from tests.e2e.live import Live, serve
from tests.helpers import bad_requests, bad_wire
from tests.helpers.bad_wire import Wire

SEED = 41
LONG_S = 300.0
NUM_SENDERS = 2
# The short run has so many of each sender, and of each operation: in a time, a loaded machine would send too few.
NUM_SENT, NUM_EXAMPLES = 250, 12
ABORT = "/abort_request"
SECONDS = [
    pytest.param(None, marks=pytest.mark.wide),
    pytest.param(LONG_S, marks=[pytest.mark.long, pytest.mark.timeout(int(LONG_S) + 900)]),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("hostile"), *FLAGS, *LIMITS, "--max-queued-requests", "64") as server:
        warm(server)
        yield server


@pytest.mark.parametrize("seconds", SECONDS, ids=["short", "long"])
async def test_no_hostile_request_harms_the_server_or_another(
    live: Live, seconds: float | None, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    before = Belongings(live)
    async with httpx.AsyncClient(base_url=live.url, timeout=ANSWER_S, trust_env=False) as http:
        quiet: Quiet = [await GoodStreams(http, []).once(index) for index in range(NUM_STREAMS)]
        streams = GoodStreams(http, quiet)
        async with asyncio.TaskGroup() as group:
            good = [group.create_task(streams.run(index)) for index in range(NUM_STREAMS)]
            senders = [group.create_task(send(live.url, seconds, SEED + number)) for number in range(NUM_SENDERS)]
            fuzzing = group.create_task(fuzz(live.url, seconds, tmp_path))
            faults = [told for sender in senders for told in await sender]
            printed = await fuzzing
            streams.end()
            await asyncio.gather(*good)
        aborting = await fuzz(live.url, None, tmp_path, f"--include-path {ABORT}")
        num_paths = len((await http.get("/openapi.json")).json()["paths"])
        assert num_tested(printed) + num_tested(aborting) >= num_paths
        assert num_cases(printed) >= 100
        assert await asyncio.gather(*map(streams.once, range(NUM_STREAMS))) == quiet
    print(f"{live.counter('hiserve:http_responses_total'):.0f} answers, {num_cases(printed)} cases from the schema, "
          f"{streams.num_compared} streams compared")  # fmt: skip
    assert not faults, "\n".join(faults)
    assert statuses(live) & {str(status) for status in range(500, 600)} <= {"503", "529"}
    await asyncio.to_thread(before.check)


async def send(url: str, seconds: float | None, seed: int) -> list[str]:
    """Sends malformed requests in any order, in the short run a number of them; returns what went wrong."""
    cases: list[Wire] = [*map(bad_wire.sent, bad_requests.corpus()), *bad_wire.corpus()]
    random.Random(seed).shuffle(cases)
    end_s = math.inf if seconds is None else time.monotonic() + seconds
    faults = []
    for wire in cases[:NUM_SENT] if seconds is None else itertools.cycle(cases):
        if time.monotonic() >= end_s:
            break
        try:
            told = fault(wire, await exchange(url, wire))
        except (TimeoutError, OSError, ValueError, LookupError) as error:
            told = f"{error!r}"
        if told:
            faults.append(f"{wire.name}: {told}")
    return faults


async def fuzz(url: str, seconds: float | None, folder: Path, which: str = f"--exclude-path {ABORT}") -> str:
    """Lets schemathesis make up requests, in the short run a number of them; returns what it printed.

    None, beside the good streams, to end the requests of others, which without keys anybody may.
    """
    options = f"--phases fuzzing --checks {CHECKS} --no-color {which} --request-timeout {ANSWER_S}"
    options += f" --seed {SEED} --generation-database none --continue-on-failure "
    options += f"--max-examples {NUM_EXAMPLES}" if seconds is None else f"--max-time {seconds:.0f}"
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", *options.split()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    return printed


def statuses(live: Live) -> set[str]:
    """The statuses of all answers so far."""
    return set(re.findall(r'http_responses_total\{[^}]*status_code="(\d+)"', httpx.get(f"{live.url}/metrics").text))
