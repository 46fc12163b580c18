"""Endpoints of sockets: public ones, ``tcp://host:port`` or ``ipc://path``, and the files of private ones."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hiserve.config.flags import flag_of
from hiserve.config.options import Options
from hiserve.errors import ConfigError, ResourceError

MAX_PORT = 65_535
_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://(?!\*$).+")


def endpoint_of(endpoint: str, replica: int, num_replicas: int) -> str:
    """Returns the endpoint of a replica: one port for each, or the path and the replica's number; one replica has the endpoint."""
    if num_replicas == 1:
        return endpoint
    tcp = _TCP.fullmatch(endpoint)
    return f"tcp://{tcp['host']}:{int(tcp['port']) + replica}" if tcp else f"{endpoint}-{replica}"


def topic_of(given: str) -> tuple[str, str]:
    """Returns endpoint and topic of ``--kv-events``."""
    endpoint, _, topic = given.partition("?topic=")
    return endpoint, topic


def check_kv_events(config: Options) -> None:
    """Checks the endpoints of KV events.

    Raises:
        ConfigError: One is malformed, they overlap, or there is nothing to publish.
    """
    events, replay = config.cache.kv_events, config.cache.kv_events_replay
    num_replicas = config.parallel.replicas
    if events is None:
        if replay is not None:
            raise ConfigError("--kv-events-replay replays what --kv-events publishes. Set both.", param="kv_events")
        return
    if config.cache.disable_prefix_cache:
        raise ConfigError(
            "--kv-events tells of cached prefixes, but --disable-prefix-cache is set. Leave one of them out.",
            param="kv_events",
        )
    events, _ = topic_of(events)
    _check(events, "kv_events", num_replicas)
    if replay is None:
        return
    _check(replay, "kv_events_replay", num_replicas)
    taken = {_address(endpoint_of(events, replica, num_replicas)) for replica in range(num_replicas)}
    both = [_address(endpoint_of(replay, replica, num_replicas)) for replica in range(num_replicas)]
    if not taken.isdisjoint(both):
        raise ConfigError(
            f"--kv-events {events} and --kv-events-replay {replay} overlap for {num_replicas} replicas, of which each "
            "needs an address of its own for both. Move one of them.",
            param="kv_events_replay",
        )


def _check(endpoint: str, name: str, num_replicas: int) -> None:
    tcp = _TCP.fullmatch(endpoint)
    if not (tcp or _IPC.fullmatch(endpoint)):
        raise ConfigError(
            f"{flag_of(name)} is {endpoint!r}; give tcp://HOST:PORT (HOST may be *) or ipc://PATH.", param=name
        )
    if tcp and not 1 <= int(tcp["port"]) <= MAX_PORT - num_replicas + 1:
        raise ConfigError(
            f"{flag_of(name)} is {endpoint!r}; with {num_replicas} replicas its port may be 1 to "
            f"{MAX_PORT - num_replicas + 1}. Choose another.",
            param=name,
        )


def _address(endpoint: str) -> str:
    """Returns the part that must differ between endpoints: the port, on any interface, or the path."""
    tcp = _TCP.fullmatch(endpoint)
    return tcp["port"] if tcp else endpoint


SCHEME = "ipc://"
POLL_S = 0.002


def new_endpoint() -> str:
    """Returns a new endpoint, in a new directory that only this user can read.

    Raises:
        ResourceError: The directory for temporary files cannot be used.
    """
    try:
        return f"{SCHEME}{tempfile.mkdtemp(prefix='hiserve-')}/s"
    except OSError as error:
        raise ResourceError(f"No directory for sockets can be made: {error}. Point TMPDIR elsewhere.") from error


def path_of(endpoint: str) -> Path:
    """Returns the file of an ``ipc://`` endpoint; it exists while a socket listens there."""
    return Path(endpoint.removeprefix(SCHEME))


def wait_for_listener(endpoint: str, timeout_s: float, may_come: Callable[[], bool]) -> None:
    """Waits until a socket listens at a new endpoint, it is removed, ``may_come`` returns False, or the timeout."""
    path, late_s = path_of(endpoint), time.monotonic() + timeout_s
    while path.parent.is_dir() and not path.exists() and may_come() and time.monotonic() < late_s:
        time.sleep(POLL_S)


def remove(endpoint: str) -> None:
    """Removes an endpoint with its directory; connections stay."""
    shutil.rmtree(path_of(endpoint).parent, ignore_errors=True)


def require_free(path: Path) -> None:
    """Checks that no living process listens at a path and that it is no other file: zmq would replace both.

    Raises:
        OSError: One of these is there.
    """
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(errno.EEXIST, "no socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(errno.EADDRINUSE, "in use")
