"""The order in which the gateway tries its engines; Ray itself is not needed for it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from hiserve.cache.storage.breaker import MAX_FAILURES, PAUSE_S, Breaker
from tests.helpers.clock import Clock

NAME = "hiserve.ray_app"
REQUEST = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []})


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the applications, with a stand-in for Ray."""
    ray, exceptions = types.ModuleType("ray"), types.ModuleType("ray.exceptions")
    vars(ray)["serve"], vars(exceptions)["RayError"] = types.SimpleNamespace(), RuntimeError
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def test_an_engine_whose_pause_is_over_gets_its_conversations_again(app: Any) -> None:
    """Requests of other conversations, which do not try it, change nothing."""
    gateway, clock = app.Gateway(None, None), Clock()
    gateway._breakers = [Breaker(clock), Breaker(clock)]
    homes = {gateway._order(REQUEST, raw)[0]: raw for raw in (b'{"prompt": "%d"}' % number for number in range(20))}
    for _ in range(MAX_FAILURES):
        gateway._breakers[0].failed()
    assert gateway._order(REQUEST, homes[0]) == [1, 0]
    clock.now_s += PAUSE_S
    assert gateway._order(REQUEST, homes[1]) == [1, 0]
    assert gateway._order(REQUEST, homes[0]) == [0, 1]


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        ({"path": "/v1/models", "query_string": b"a=1"}, "/v1/models?a=1"),
        ({"path": "/one/v1/models", "root_path": "/one"}, "/v1/models"),
        ({"path": "/one", "root_path": "/one"}, "/"),
    ],
)
def test_engines_do_not_see_the_prefix_of_their_application(app: Any, scope: dict[str, Any], target: str) -> None:
    given = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "server": ("a", 80)} | scope
    assert app._target(Request(given)) == target
