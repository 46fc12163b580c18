"""Malformed requests, each with its one answer, while good streams run that must not notice them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.good_streams import (
    ANSWER_S,
    FLAGS,
    LIMITS,
    NUM_STREAMS,
    Belongings,
    GoodStreams,
    Quiet,
    check_log,
    exchange,
    fault,
    warm,
)
from tests.e2e.live import Live, serve
from tests.helpers import bad_requests, bad_wire
from tests.helpers.bad_requests import MAX_REQUEST_BYTES, NATIVE, TEXT, Answer, Bad
from tests.helpers.bad_wire import Wire
from tests.helpers.small_model import small_model


async def run_corpus(
    url: str, corpus: Iterable[Wire], quiet: Quiet, headers: dict[str, str] | None = None
) -> list[str]:
    """Sends each case while good streams run, and then these alone once more; returns what went wrong.

    Args:
        url: Of the server.
        corpus: The cases.
        quiet: What the streams must be.
        headers: Of the good requests.
    """
    faults, num_cases = [], 0
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False, headers=headers) as http:
        streams = GoodStreams(http, quiet)
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_STREAMS):
                group.create_task(streams.run(index))
            for wire in corpus:
                await streams.enough()
                try:
                    told = fault(wire, await exchange(url, wire))
                except (TimeoutError, OSError, ValueError, LookupError) as error:
                    told = f"{error!r}"
                num_cases += 1
                if told:
                    faults.append(f"{wire.name}: {told}")
            streams.end()
        assert await asyncio.gather(*map(streams.once, range(NUM_STREAMS))) == quiet
        assert streams.num_compared >= NUM_STREAMS
    print(f"{num_cases} cases, {streams.num_compared} streams compared")
    return faults


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("bad"), small_model(), *FLAGS, *LIMITS) as server:
        warm(server)
        yield server


@pytest.fixture(scope="module")
def quiet(live: Live) -> Quiet:
    async def run() -> Quiet:
        async with httpx.AsyncClient(base_url=live.url, timeout=ANSWER_S, trust_env=False) as http:
            return [await GoodStreams(http, []).once(index) for index in range(NUM_STREAMS)]

    found = asyncio.run(run())
    assert len({token for tokens in found for choice in tokens.values() for token in choice}) >= 20
    return found


async def test_malformed_bodies_get_their_answers_and_disturb_nobody(live: Live, quiet: Quiet) -> None:
    before = Belongings(live)
    cases = [bad_wire.sent(bad) for bad in bad_requests.corpus()]
    assert len(cases) > 900
    faults = await run_corpus(live.url, cases, quiet)
    assert not faults, "\n".join(faults)
    await asyncio.to_thread(before.check)


async def test_malformed_http_gets_its_answers_and_disturbs_nobody(live: Live, quiet: Quiet) -> None:
    before = Belongings(live)
    cases = bad_wire.corpus()
    assert len(cases) > 150
    faults = await run_corpus(live.url, cases, quiet)
    assert not faults, "\n".join(faults)
    await asyncio.to_thread(before.check)


NO_KEY = Answer(401, "invalid_api_key")
NOT_ALLOWED = Answer(403, "forbidden")
KEY, ADMIN_KEY = "key-1", "admin-1"


def strangers() -> Iterator[Bad]:
    """Yields requests without a right to what they ask for; malformed or not, that is what they are told."""
    wrong = ("", "key-1", "Bearer", "Bearer ", "Bearer key-2", "Bearer key-1x", "Basic key-1", "Bearer " + "k" * 60_000)
    headers = [(), *((f"authorization: {text}".encode(),) for text in wrong), (b"authorization: Bearer \xff\xfe",)]
    headers += [(b"authorization: Bearer no", b"authorization: Bearer key-1"), (b"x-api-key: key-2",)]
    headers += [(b"x-api-key: Bearer key-1",), (b"authorization: Bearer no", b"x-api-key: key-1")]
    for lines in headers:
        yield Bad(TEXT, {"prompt": "Hi"}, NO_KEY, headers=lines)
    for path in (*bad_requests.POST_ROUTES, "/flush_cache", "/reset_prefix_cache", "/nowhere", "/v1/completions/"):
        for body in (b"", b"{", b'{"prompt": 5}', b"[" * 50_000, b"x" * (MAX_REQUEST_BYTES + 1)):
            yield Bad(path, body, NO_KEY)
    mine = (f"authorization: Bearer {KEY}".encode(),)
    for path, method in (("/flush_cache", "POST"), ("/reset_prefix_cache", "POST"), ("/server_info", "GET")):
        yield Bad(path, b"", NOT_ALLOWED, method=method, headers=mine)
    yield Bad("/abort_request", {"abort_all": True}, NOT_ALLOWED, headers=mine)
    yield Bad(NATIVE, {"text": 5}, Answer(400, "invalid_request", "text"), headers=mine)


async def test_requests_without_a_right_are_told_so_and_disturb_nobody(quiet: Quiet, tmp_path: Path) -> None:
    with serve(tmp_path, small_model(), *FLAGS, *LIMITS, "--api-key", KEY, "--admin-api-key", ADMIN_KEY) as live:
        cases = [bad_wire.sent(bad_requests.in_its_form(bad)) for bad in strangers()]
        faults = await run_corpus(live.url, cases, quiet, {"authorization": f"Bearer {KEY}"})
        assert not faults, "\n".join(faults)
        check_log(live)
        assert KEY not in Path(live.log).read_text()
