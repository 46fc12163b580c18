"""Keys: who gets in, what each may do, and whose cache is whose."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from hiserve.config.serving import Server as Settings
from hiserve.core.request import SamplingParams
from hiserve.errors import AuthenticationError
from hiserve.server.http.auth import Auth, Caller, namespace_of, tag_of
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script

KEYS = {"api_key": ("alpha", "bêta")}
ADMIN = {"admin_api_key": "root"}
ADMIN_CALLS = [
    ("GET", "/server_info", b""),
    ("GET", "/get_server_info", b""),
    ("GET", "/cache/stats", b""),
    ("GET", "/cache/tree", b""),
    ("GET", "/debug/rows", b""),
    ("GET", "/debug/steps", b""),
    ("POST", "/flush_cache", b""),
    ("POST", "/reset_prefix_cache", b""),
    ("POST", "/abort_request", {"abort_all": True}),
]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def guarded(**settings: Any) -> Server:
    return make_server(FakeEngineClient(script=lambda prompt: reply_script()), **settings)


def request(caller: Caller, request_id: str = "id") -> Request:
    return Request({"type": "http", "state": {"caller": caller, "request_id": request_id}})


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET"),
        ("/server_info", "GET"),
        ("/model_info", "GET"),
        ("/get_load", "GET"),
        ("/v1/loads", "GET"),
        ("/health_generate", "GET"),
        ("/flush_cache", "POST"),
        ("/abort_request", "POST"),
        ("/nowhere", "GET"),
        ("/docs", "GET"),
        ("/health/", "GET"),
        ("//health", "GET"),
        ("/metrics/../v1/models", "GET"),
        ("/HEALTH", "GET"),
    ],
)
@pytest.mark.parametrize("key", [None, "", "wrong", "alph", "alphaa", "Alpha"])
async def test_without_a_known_key_nothing_is_served(path: str, method: str, key: str | None) -> None:
    call = await guarded(**KEYS).call(method, path, **bearer(key)).end()
    assert call.status == 401
    assert call.json["error"]["code"] == "invalid_api_key"
    assert call.headers["www-authenticate"] == "Bearer"
    assert call.headers["x-request-id"]


@pytest.mark.parametrize("scheme", ["Basic alpha", "alpha", "Bearer", "Bearer  ", "Token alpha", "Beareralpha"])
async def test_only_a_bearer_token_counts(scheme: str) -> None:
    assert (await guarded(**KEYS).call("GET", "/v1/models", authorization=scheme).end()).status == 401


@pytest.mark.parametrize(
    "authorization", ["Bearer alpha", "bearer alpha", "BEARER   alpha ", "Bearer bêta", "Bearer root"]
)
async def test_every_configured_key_gets_in(authorization: str) -> None:
    call = await guarded(**KEYS, **ADMIN).call("GET", "/v1/models", authorization=authorization).end()
    assert call.status == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/ping"])
async def test_watchdogs_and_scrapers_need_no_key(path: str) -> None:
    assert (await guarded(**KEYS, **ADMIN).get(path)).status != 401


TELLING = (
    "prefix_cache_hits",
    "prefix_cache_queries",
    "cached_tokens",
    "prompt_tokens",
    "time_to_first_token",
    "misses",
)


@pytest.mark.parametrize("compat", ["none", "vllm", "sglang"])
async def test_metrics_tell_a_tenant_nothing_of_what_others_ask_and_find_cached(compat: str) -> None:
    made = guarded(**KEYS, **ADMIN, metrics_key="watch", compat=compat)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await made.post("/v1/chat/completions", body, **bearer("alpha"))).status == 200
        shown = {}
        for key in (None, "alpha", "bêta", "watch", "root", "wrong"):
            call = await made.call("GET", "/metrics", **bearer(key)).end()
            shown[key] = (call.status, call.text)
        for key in (None, "alpha", "bêta"):
            status, text = shown[key]
            assert status == 200
            assert "hiserve:engine_up" in text and "hiserve:num_requests_running" in text
            assert [word for word in TELLING if word in text] == [], key
        for key in ("watch", "root"):
            assert shown[key][0] == 200
            assert 'hiserve:prefix_cache_queries_total{model_name="tiny"}' in shown[key][1]
        assert shown["wrong"][0] == 401


@pytest.mark.parametrize(
    ("settings", "is_whole"),
    [
        ({}, True),
        (ADMIN, True),
        ({"metrics_key": "watch"}, False),
        (KEYS, False),
        (KEYS | {"share_prefixes": True}, False),
    ],
)
async def test_without_keys_the_metrics_are_for_all(settings: dict[str, Any], is_whole: bool) -> None:
    text = (await guarded(**settings).get("/metrics")).text
    assert ("prefix_cache_hits" in text) is is_whole


async def test_without_keys_any_authorization_is_welcome() -> None:
    made = guarded()
    for key in (None, "none", "EMPTY"):
        assert (await made.call("GET", "/v1/models", **bearer(key)).end()).status == 200


def test_the_keys_are_compared_in_constant_time_and_always_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    true_compare = hmac.compare_digest

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return true_compare(first, second)

    auth = Auth(Settings(**KEYS, **ADMIN))
    monkeypatch.setattr("hiserve.server.http.auth.hmac.compare_digest", compare)
    for given in (b"Bearer alpha", "Bearer bêta".encode(), b"Bearer root"):
        compared.clear()
        auth.caller(given)
        assert compared == [(32, 32)] * 3
    compared.clear()
    with pytest.raises(AuthenticationError):
        auth.caller(b"Bearer x")
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(("method", "path", "body"), ADMIN_CALLS)
@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 200),
        ({}, "anything", 200),
        (KEYS, "alpha", 403),
        (KEYS | ADMIN, "alpha", 403),
        (KEYS | ADMIN, "root", 200),
        (KEYS | ADMIN, None, 401),
        (ADMIN, None, 401),
        (ADMIN, "wrong", 401),
        (ADMIN, "root", 200),
    ],
)
async def test_what_affects_all_tenants_needs_the_admin_key(
    method: str, path: str, body: Any, settings: dict[str, Any], key: str | None, status: int
) -> None:
    made = guarded(**settings)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        call = await made.call(method, path, body, **bearer(key)).end()
        assert call.status == status, call.text
        assert bool(made.engine.flushed) == (status == 200 and ("flush" in path or "reset" in path))
    if status == 403:
        assert call.json["error"]["code"] == "forbidden"
        wanted = "needs the admin key" if "admin_api_key" in settings else "--admin-api-key"
        assert wanted in call.json["error"]["message"]


async def test_the_admin_key_alone_leaves_ordinary_routes_open() -> None:
    made = guarded(**ADMIN)
    for key in (None, "none", "root"):
        assert (await made.call("GET", "/v1/models", **bearer(key)).end()).status == 200


async def test_server_info_shows_no_secret() -> None:
    made = guarded(api_key=("sesame-one", "sesame-two"), admin_api_key="sesame-admin")
    call = await made.call("GET", "/server_info", **bearer("sesame-admin")).end()
    assert call.status == 200
    assert "sesame" not in call.text


def test_each_key_has_a_namespace_and_a_salt_only_narrows_it() -> None:
    auth = Auth(Settings(**KEYS))
    alpha, beta = auth.caller(b"Bearer alpha"), auth.caller("Bearer bêta".encode())
    spaces = [
        namespace_of(request(caller), salt)
        for caller in (Caller(), alpha, beta)
        for salt in (None, "s", "t", alpha.key.hex())
    ]
    assert len(set(spaces)) == len(spaces)
    assert spaces[0] == b""
    assert {len(space) for space in spaces[1:]} == {16}
    assert namespace_of(request(alpha)) == namespace_of(request(auth.caller(b"bearer alpha")))
    assert namespace_of(request(alpha), "") == namespace_of(request(alpha))
    again = Auth(Settings(api_key=("other", "alpha"))).caller(b"Bearer alpha")
    assert namespace_of(request(again)) == namespace_of(request(alpha)), "a restart must find its cache again"


def test_callers_who_share_are_kept_apart_by_salt_alone() -> None:
    auth = Auth(Settings(**KEYS, share_prefixes=True))
    alpha, beta = auth.caller(b"Bearer alpha"), auth.caller("Bearer bêta".encode())
    assert namespace_of(request(alpha)) == namespace_of(request(beta)) == b""
    assert namespace_of(request(alpha), "s") == namespace_of(request(beta), "s") != b""
    assert tag_of(request(alpha)) != tag_of(request(beta))


def test_a_request_is_named_by_its_body_or_its_id() -> None:
    assert tag_of(request(Caller(), "a")) == tag_of(request(Caller(), "b"), "a")
    auth = Auth(Settings(**KEYS, **ADMIN))
    callers = [Caller(), *(auth.caller(f"Bearer {key}".encode()) for key in ("alpha", "bêta", "root"))]
    assert auth.tags("a") == [tag_of(request(caller, "a")) for caller in callers]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_the_engine_is_told_whose_a_request_is_by_a_number_alone(path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "text": "Hi"}
    keys = {"api_key": ("alpha", "beta", "beta", "gamma"), **ADMIN}
    for made, given, numbers in (
        (guarded(**keys), ("alpha", "beta", "gamma", "root"), [1, 3, 4, 5]),
        (guarded(), (None, "alpha"), [0, 0]),
    ):
        async with made.app.router.lifespan_context(made.app):
            await made.handle.wait_open()
            for key in given:
                await made.call("POST", path, body, **bearer(key)).end()
        assert [seen.caller for seen in made.engine.seen] == numbers


class Waiting:
    """Requests in a server's engine that wait for ever."""

    def __init__(self, made: Server) -> None:
        self.made = made
        self.tasks: list[asyncio.Future[object]] = []

        async def hang(_: int) -> None:
            await asyncio.Event().wait()

        made.engine.step = hang

    def start(self, key: str, rid: str) -> None:
        """Puts a request into the engine, as a route does."""
        caller = Auth(Settings(**KEYS, **ADMIN)).caller(f"Bearer {key}".encode())
        stream = self.made.engine.generate(np.zeros(1, np.int32), SamplingParams(), tag=tag_of(request(caller), rid))
        self.tasks.append(asyncio.ensure_future(anext(stream)))


@pytest.mark.parametrize(
    ("key", "body", "aborted"),
    [
        ("alpha", {"rid": "a"}, 1),
        ("alpha", {"rid": "b"}, 0),
        ("root", {"rid": "a"}, 2),
        ("root", {"rid": "b"}, 1),
        ("root", {"abort_all": True}, 3),
        ("root", {"rid": "a", "abort_all": True}, 3),
    ],
)
async def test_a_caller_ends_his_own_requests_and_the_admin_anyones(
    key: str, body: dict[str, Any], aborted: int
) -> None:
    made = guarded(**KEYS, **ADMIN)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        waiting = Waiting(made)
        for owner, rid in (("alpha", "a"), ("bêta", "a"), ("bêta", "b")):
            waiting.start(owner, rid)
        await asyncio.sleep(0)
        call = await made.call("POST", "/abort_request", body, **bearer(key)).end()
        assert call.json == {"aborted": aborted}
        made.engine.abort()
        await asyncio.gather(*waiting.tasks)


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None}, {"rid": 5}, {"abort_all": "yes"}, []])
async def test_an_abort_names_what_it_ends(server: Server, body: Any) -> None:
    call = await server.post("/abort_request", body if isinstance(body, dict) else b"[]")
    assert call.status == 400
