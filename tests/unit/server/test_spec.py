"""Speculation at the front end: what a request may ask of it, and what is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hiserve.core.request import SpecParams
from hiserve.core.usage import DraftStats, DraftUse
from hiserve.ipc.messages import WorkerStats
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import NUM_STEPS, Server, make_server, reply_script

FIRST, LAST = DraftUse(1, 3, (1, 0, 0)), DraftUse(4, 12, (3, 2, 1))
SHOWN = {
    "accept_length": 2.5,
    "proposed": 12,
    "accepted": 6,
    "verify_steps": 4,
    "accepted_per_position": [3, 2, 1],
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi"}),
]


@pytest.fixture
async def speculating() -> AsyncIterator[Server]:
    """A server whose engine verifies three drafts at most."""
    engine = FakeEngineClient(script=lambda prompt: reply_script())
    engine.drafts = [FIRST, *[None] * (NUM_STEPS - 2), LAST]
    made = make_server(engine, spec_steps=3)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


# --- what is told ------------------------------------------------------------------------------


async def test_every_form_of_usage_tells_of_drafts(speculating: Server) -> None:
    for path, body in FORMS:
        assert (await speculating.post(path, body)).json["usage"]["spec_tokens_details"] == SHOWN
        asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
        *_, last, _ = (await speculating.post(path, asked)).events
        assert last["usage"]["spec_tokens_details"] == SHOWN
    meta = (await speculating.post("/generate", {"text": "Hi"})).json["meta_info"]
    assert meta["spec_tokens_details"] == SHOWN


async def test_running_usage_tells_of_the_drafts_so_far(speculating: Server) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "prompt": "Hi"}
    events = (await speculating.post("/v1/completions", asked)).events
    told = [event["usage"]["spec_tokens_details"]["verify_steps"] for event in events if event != "[DONE]"]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (1, 4)


async def test_the_drafts_of_several_choices_are_summed(speculating: Server) -> None:
    details = (await speculating.chat("Hi", n=2)).json["usage"]["spec_tokens_details"]
    assert (details["verify_steps"], details["accepted_per_position"]) == (8, [6, 4, 2])
    assert details["accept_length"] == 2.5


async def test_without_speculation_usage_says_nothing_of_it(server: Server) -> None:
    for path, body in FORMS:
        assert "spec_tokens_details" not in (await server.post(path, body)).json["usage"]
    assert "spec_tokens_details" not in (await server.post("/generate", {"text": "Hi"})).json["meta_info"]


# --- what may be asked -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, None),
        ({}, SpecParams()),
        ({"enabled": None, "num_steps": None}, SpecParams()),
        ({"enabled": False}, SpecParams(enabled=False)),
        ({"enabled": True, "num_steps": 3}, SpecParams(enabled=True, num_steps=3)),
        ({"num_steps": 0}, SpecParams(num_steps=0)),
    ],
)
async def test_what_is_asked_reaches_the_engine(
    speculating: Server, given: dict[str, Any] | None, taken: SpecParams | None
) -> None:
    for path, body in FORMS:
        assert (await speculating.post(path, {**body, "spec": given})).status == 200
    native = {"text": "Hi", "sampling_params": {"spec": given}}
    assert (await speculating.post("/generate", native)).status == 200
    assert [seen.sampling.spec for seen in speculating.engine.seen] == [taken] * 3


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"num_steps": 4}, "spec.num_steps", "the most here is 3"),
        ({"enabled": False, "num_steps": 4}, "spec.num_steps", "the most here is 3"),
        ({"num_steps": 16}, "spec.num_steps", "between 0 and 15"),
        ({"num_steps": -1}, "spec.num_steps", "between 0 and 15"),
        ({"num_steps": 1.0}, "spec.num_steps", "whole number"),
        ({"num_steps": True}, "spec.num_steps", "whole number"),
        ({"enabled": 1}, "spec.enabled", "true or false"),
        ({"steps": 2}, "spec", "has a field 'steps', which is not known; it must be an object with enabled, num_steps"),
        ([], "spec", "an object"),
        (True, "spec", "an object"),
    ],
)
async def test_what_cannot_be_is_refused_and_says_what_can(
    speculating: Server, given: Any, param: str, says: str
) -> None:
    for path, body, prefix in (
        *((path, {**body, "spec": given}, "") for path, body in FORMS),
        ("/generate", {"text": "Hi", "sampling_params": {"spec": given}}, "sampling_params."),
    ):
        call = await speculating.post(path, body)
        assert call.status == 400
        assert call.json["error"]["param"] == prefix + param
        assert says in call.json["error"]["message"]
    assert not speculating.engine.seen


async def test_a_server_that_does_not_speculate_says_how_it_would(server: Server) -> None:
    for given, param in (({"enabled": True}, "spec.enabled"), ({"num_steps": 1}, "spec.num_steps")):
        call = await server.chat("Hi", spec=given)
        assert (call.status, call.json["error"]["param"]) == (400, param)
        assert "--spec" in call.json["error"]["message"]
    for harmless in ({}, {"enabled": False}, {"num_steps": 0}):
        assert (await server.chat("Hi", spec=harmless)).status == 200


# --- what is counted ---------------------------------------------------------------------------

COLD, HOST = DraftUse(10, 30, (8, 4, 2)), DraftUse(2, 6, (2, 2, 2))
NOTHING = DraftUse(0, 0, (0, 0, 0))


def stats(cold: DraftUse, host: DraftUse, **chosen: int) -> WorkerStats:
    chosen_steps = {name.removeprefix("k"): count for name, count in chosen.items()}
    return WorkerStats(drafts=DraftStats({"cold": cold, "host": host, "store": NOTHING}, chosen_steps))


async def test_drafts_are_counted_by_source_and_position_and_never_fall(server: Server) -> None:
    async def after(incarnation: int, now: WorkerStats) -> list[float]:
        server.engine.incarnation, server.engine.stats = incarnation, now
        name = "hiserve:spec_decode_num_"
        return [
            await server.metric(f"{name}drafts_total", cache_source="cold"),
            await server.metric(f"{name}draft_tokens_total", cache_source="cold"),
            await server.metric(f"{name}accepted_tokens_total", cache_source="cold"),
            await server.metric(f"{name}accepted_tokens_total", cache_source="host"),
            await server.metric(f"{name}accepted_tokens_per_pos_total", position="0"),
            await server.metric(f"{name}accepted_tokens_per_pos_total", position="2"),
            await server.metric("hiserve:spec_decode_chosen_steps_total", num_steps="3"),
            await server.metric("hiserve:spec_accept_length", cache_source="cold"),
            await server.metric("hiserve:spec_accept_length", cache_source="host"),
            await server.metric("hiserve:spec_accept_length", cache_source="store"),
        ]

    assert await after(1, stats(COLD, NOTHING, k3=9)) == [10, 30, 14, 0, 8, 2, 9, 2.4, 1, 1]
    assert await after(1, stats(COLD, HOST, k0=1, k3=12)) == [10, 30, 14, 6, 10, 4, 12, 2.4, 4, 1]
    assert await server.metric("hiserve:spec_decode_chosen_steps_total", num_steps="0") == 1
    assert await server.metric("hiserve:spec_accept_length", cache_source="all") == pytest.approx(1 + 20 / 12)
    assert await after(2, stats(NOTHING, HOST, k3=1)) == [10, 30, 14, 12, 12, 6, 13, 1, 4, 1]


async def test_searches_of_replies_are_counted_by_their_result(server: Server) -> None:
    drafts = DraftStats(reply_searches={"found": 5, "none": 2}, kept_reply_tokens=70)
    server.engine.incarnation, server.engine.stats = 1, WorkerStats(drafts=drafts)
    name = "hiserve:spec_decode_reply_searches_total"
    assert [await server.metric(name, result=result) for result in ("found", "none")] == [5, 2]
    info = (await server.get("/server_info")).json
    assert info["workers"][0]["stats"]["drafts"]["kept_reply_tokens"] == 70


async def test_without_speculation_there_are_no_series(server: Server) -> None:
    lines = (await server.get("/metrics")).text.splitlines()
    assert not [line for line in lines if line.startswith("hiserve:spec_")]


@pytest.mark.parametrize("compat", ["vllm", "sglang"])
async def test_other_engines_names_show_drafts(compat: str) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), stats=stats(COLD, HOST, k3=9))
    made = make_server(engine, compat=compat)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        if compat == "sglang":
            assert await made.metric("sglang:spec_accept_length") == pytest.approx(1 + 20 / 12)
            return
        name = "vllm:spec_decode_num_"
        assert await made.metric(f"{name}drafts_total") == 12
        assert await made.metric(f"{name}draft_tokens_total") == 36
        assert await made.metric(f"{name}accepted_tokens_total") == 20
        assert await made.metric(f"{name}accepted_tokens_per_pos_total", position="1") == 6


async def test_server_info_shows_drafts_in_the_words_of_the_usage(server: Server) -> None:
    server.engine.stats = stats(LAST, NOTHING, k3=9)
    info = (await server.get("/server_info")).json
    for shown in (info["workers"][0]["stats"], info["internal_states"][0]):
        assert shown["drafts"]["by_source"]["cold"] == SHOWN
        assert shown["drafts"]["chosen_steps"] == {"3": 9}
