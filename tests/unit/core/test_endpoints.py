"""Endpoints for routers: what is one, whose is whose among replicas, and which contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.config.options import make_options
from hiserve.core.endpoints import check_kv_events, endpoint_of, topic_of
from hiserve.errors import ConfigError


def refused(**config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        check_kv_events(make_options(**config))
    return raised.value


@pytest.mark.parametrize(
    ("endpoint", "of_first", "of_third"),
    [
        ("tcp://*:5557", "tcp://*:5557", "tcp://*:5559"),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("tcp://node-7.cluster:5557", "tcp://node-7.cluster:5557", "tcp://node-7.cluster:5559"),
        ("ipc:///run/events", "ipc:///run/events-0", "ipc:///run/events-2"),
    ],
)
def test_each_replica_has_the_next_port_or_a_path_with_its_number(endpoint: str, of_first: str, of_third: str) -> None:
    check_kv_events(make_options(kv_events=endpoint, replicas=3))
    assert (endpoint_of(endpoint, 0, 3), endpoint_of(endpoint, 2, 3)) == (of_first, of_third)
    assert endpoint_of(endpoint, 0, 1) == endpoint


@pytest.mark.parametrize("name", ["kv_events", "kv_events_replay"])
@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "5557", "tcp://", "tcp://*", "tcp://*:", "tcp://:5557", "tcp://*:x", "tcp://*:-1", "tcp://*:5557 "),
        *("tcp://*:123456", "tcp://*:5557/x", "tcp://a b:1", "udp://*:5557", "inproc://events", "ipc://", "ipc://*"),
        *("ipc:/run/events", "TCP://*:5557", "*:5557"),
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(name: str, endpoint: str) -> None:
    error = refused(**{"kv_events": "tcp://*:5557", name: endpoint})
    flag = "--" + name.replace("_", "-")
    assert error.message == f"{flag} is {endpoint!r}; give tcp://HOST:PORT (HOST may be *) or ipc://PATH."
    assert error.param == name


@pytest.mark.parametrize(("port", "replicas"), [(0, 1), (65_536, 1), (65_535, 2), (99_999, 1)])
def test_the_ports_of_all_replicas_must_exist(port: int, replicas: int) -> None:
    error = refused(kv_events=f"tcp://*:{port}", replicas=replicas)
    assert f"with {replicas} replicas its port may be 1 to {65_536 - replicas}." in error.message
    check_kv_events(make_options(kv_events=f"tcp://*:{65_536 - replicas}", replicas=replicas))


@pytest.mark.parametrize(
    ("events", "replay", "replicas"),
    [
        ("tcp://*:5557", "tcp://*:5557", 1),
        ("tcp://*:5557", "tcp://127.0.0.1:5557", 1),
        ("tcp://*:5557", "tcp://*:5558", 2),
        ("tcp://*:5558", "tcp://*:5557", 2),
        ("tcp://*:5557", "tcp://*:5560", 4),
        ("ipc:///run/events", "ipc:///run/events", 1),
    ],
)
def test_events_and_replays_share_no_address_in_any_replica(events: str, replay: str, replicas: int) -> None:
    error = refused(kv_events=events, kv_events_replay=replay, replicas=replicas)
    assert error.message.startswith(f"--kv-events {events} and --kv-events-replay {replay} overlap for {replicas} ")
    assert error.param == "kv_events_replay"


@pytest.mark.parametrize(
    ("events", "replay", "replicas"),
    [
        ("tcp://*:5557", "tcp://*:5558", 1),
        ("tcp://*:5557", "tcp://*:5559", 2),
        ("tcp://*:5557", "ipc:///run/replay", 2),
        ("ipc:///run/events", "ipc:///run/replay", 2),
        (None, None, 1),
        ("tcp://*:5557", None, 2),
    ],
)
def test_addresses_that_go_together_are_taken(events: str | None, replay: str | None, replicas: int) -> None:
    check_kv_events(make_options(kv_events=events, kv_events_replay=replay, replicas=replicas))


def test_a_replay_of_nothing_is_refused() -> None:
    assert refused(kv_events_replay="tcp://*:5558").message == (
        "--kv-events-replay replays what --kv-events publishes. Set both."
    )


def test_an_endpoint_may_have_a_topic() -> None:
    given = "tcp://*:5557?topic=kv@10.0.0.1:8000@org/model"
    check_kv_events(make_options(kv_events=given, kv_events_replay="tcp://*:5558"))
    assert topic_of(given) == ("tcp://*:5557", "kv@10.0.0.1:8000@org/model")
    assert topic_of("ipc://a") == ("ipc://a", "")
    assert "overlap" in refused(kv_events=given, kv_events_replay="tcp://*:5557").message


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    error = refused(kv_events="tcp://*:5557", disable_prefix_cache=True)
    assert "--disable-prefix-cache" in error.message and error.param == "kv_events"
