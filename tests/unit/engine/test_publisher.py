"""The publisher of KV events: numbers, replays, heartbeats; nobody holds it up, and no address is taken from others."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hiserve.engine.kv_event_sender import MAX_KEPT_BATCHES, Publisher
from hiserve.errors import InvariantError, ResourceError
from hiserve.ipc import channel
from hiserve.ipc.channel import MAX_UNREAD_EVENTS, PublishChannel
from hiserve.ipc.kv_events import Cleared, Removed
from tests.helpers.kv_mirror import Reader
from tests.helpers.waiting import PATIENCE_S


class Setup:
    """Makes publishers and readers on sockets in a folder, and closes them."""

    def __init__(self, folder: Path) -> None:
        self.events, self.replays = f"ipc://{folder}/events", f"ipc://{folder}/replays"
        self._open: list[Any] = []

    def broadcast(self) -> PublishChannel:
        return PublishChannel(self.events, self.replays, setting="kv_events", questions_setting="kv_events_replay")

    def publisher(self, **options: Any) -> Publisher:
        made = Publisher(self.broadcast(), page_size=2, replica=1, **{"heartbeat_s": 60.0, **options})
        self._open.append(made)
        return made

    def reader(self) -> Reader:
        self._open.append(Reader(self.events, self.replays))
        return self._open[-1]  # type: ignore[no-any-return]

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == [], "a socket was left behind"
    assert not [thread for thread in threading.enumerate() if thread.name == "hiserve-kv-events"]


LAST_WORDS = itertools.count(2**60)


def change(value: int, size: int = 16) -> list[Removed]:
    return [Removed("GPU", value.to_bytes(8, "big") + bytes(8) + bytes(size - 16))]


def values(payload: bytes) -> list[int]:
    return [event["block_hashes"][0] for event in msgspec.msgpack.decode(payload)[1]]


def meet(publisher: Publisher, reader: Reader) -> int:
    """Publishes until the reader is subscribed, and a last word; returns its number, when the reader has it."""
    deadline = time.monotonic() + PATIENCE_S
    while not reader.events.poll(20):
        publisher.put(change(0))
        assert time.monotonic() < deadline
    word = next(LAST_WORDS)
    publisher.put(change(word))
    while True:
        number, payload = reader.receive()
        if values(payload) == [word]:
            return number


def test_subscribers_get_every_batch_in_order_with_its_number(setup: Setup) -> None:
    publisher = setup.publisher()
    readers = [setup.reader(), setup.reader()]
    meet(publisher, readers[0])
    last = meet(publisher, readers[1])
    while readers[0].receive()[0] < last:
        pass
    for i in range(200):
        publisher.put(change(i))
    for reader in readers:
        got = [reader.receive() for _ in range(200)]
        assert [number for number, _ in got] == list(range(last + 1, last + 201))
        assert [values(payload) for _, payload in got] == [[i] for i in range(200)]
        assert msgspec.msgpack.decode(got[0][1])[2] == 1


def test_batches_have_the_topic_that_was_given(setup: Setup) -> None:
    publisher = setup.publisher(topic="kv@10.0.0.1:8000@tiny")
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.subscribe(b"kv@")
        reader.connect(setup.events)
        deadline = time.monotonic() + PATIENCE_S
        while not reader.poll(20):
            publisher.put(change(0))
            assert time.monotonic() < deadline
        assert reader.recv_multipart()[0] == b"kv@10.0.0.1:8000@tiny"


@pytest.mark.parametrize("delimiter", [True, False], ids=["as a REQ socket asks", "without its empty frame"])
def test_who_comes_late_gets_all_by_replay(setup: Setup, delimiter: bool) -> None:
    publisher = setup.publisher()
    publisher.put([Cleared()])
    for i in range(50):
        publisher.put(change(i))
    reader = setup.reader()
    batches = list(reader.replay(0, delimiter=delimiter))
    assert [number for number, _ in batches] == list(range(51))
    assert [values(payload) for _, payload in batches[1:]] == [[i] for i in range(50)]
    assert [number for number, _ in reader.replay(40, delimiter=delimiter)] == list(range(40, 51))
    assert list(reader.replay(51, delimiter=delimiter)) == []


def test_a_request_socket_gets_its_first_answer(setup: Setup) -> None:
    """Of several answers it can only read one; it reads the end when there is nothing else."""
    setup.publisher()
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(setup.replays)
        asker.send((0).to_bytes(8, "big"))
        assert asker.poll(1000 * PATIENCE_S)
        assert asker.recv_multipart() == [b"\xff" * 8, b""]


def test_a_whole_replay_reaches_a_reader_that_takes_its_time(setup: Setup) -> None:
    publisher = setup.publisher(max_queued=MAX_KEPT_BATCHES)
    for i in range(MAX_KEPT_BATCHES):
        publisher.put(change(i, size=160))
    reader = setup.reader()
    replay = reader.replay(0)
    assert next(replay)[0] == 0
    time.sleep(0.5)
    assert [number for number, _ in replay] == list(range(1, MAX_KEPT_BATCHES))


def test_what_a_slow_subscriber_loses_its_numbers_tell_and_nobody_waits(setup: Setup) -> None:
    publisher = setup.publisher(max_queued=10**6)
    slow = setup.reader()
    last = meet(publisher, slow)
    total = 2 * MAX_UNREAD_EVENTS
    for i in range(total):
        publisher.put(change(i, size=1600))
    fast = setup.reader()
    newest = [number for number, _ in fast.replay(last + total)]
    assert newest == [last + total]
    numbers = []
    while slow.events.poll(300):
        numbers.append(slow.receive()[0])
    assert numbers == sorted(set(numbers))
    assert len(numbers) < total
    assert publisher.num_dropped == 0


def test_silence_is_broken_by_heartbeats_with_numbers_that_no_replay_has(setup: Setup) -> None:
    publisher = setup.publisher(heartbeat_s=0.05)
    publisher.put(change(7))
    reader = setup.reader()
    heard = [reader.receive() for _ in range(4)]
    beats = [each for each in heard if values(each[1]) != [7]][:3]  # a reader that was quick hears the change, too
    first = beats[0][0]
    assert first > 0
    assert [number for number, _ in beats] == [first, first + 1, first + 2]
    assert all(msgspec.msgpack.decode(payload)[1:] == [[], 1] for _, payload in beats)
    assert [values(payload) for _, payload in reader.replay(0)] == [[7]]


def test_who_talks_has_no_heartbeat(setup: Setup) -> None:
    now_s = [0.0]
    publisher = setup.publisher(heartbeat_s=60.0, clock=lambda: now_s[0])
    reader = setup.reader()
    meet(publisher, reader)
    for value in range(1, 21):
        publisher.put(change(value))
        _, payload = reader.receive()
        assert values(payload) == [value]
        now_s[0] += 59.0


def test_what_finds_the_queue_full_is_dropped_with_its_number_and_counted(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, go = threading.Event(), threading.Event()

    class Stuck(list[Removed]):
        def __iter__(self) -> Iterator[Removed]:
            stuck.set()
            assert go.wait(60)
            return super().__iter__()

    publisher = setup.publisher(max_queued=3)
    publisher.put(Stuck(change(0)))
    assert stuck.wait(60)
    with caplog.at_level(logging.WARNING):
        for i in range(1, 8):
            publisher.put(change(i))
    assert publisher.num_dropped == 4
    assert [record.getMessage() for record in caplog.records] == [
        "KV events are dropped: 3 batches wait to be published"
    ]
    go.set()
    reader = setup.reader()
    deadline = time.monotonic() + 60
    while len(list(reader.replay(0))) < 4:
        assert time.monotonic() < deadline
    publisher.put(change(8))
    while len(got := list(reader.replay(0))) < 5:
        assert time.monotonic() < deadline
    assert [(number, *values(payload)) for number, payload in got] == [(0, 0), (1, 1), (2, 2), (3, 3), (8, 8)]


def test_a_question_that_is_nonsense_harms_nobody(setup: Setup) -> None:
    publisher = setup.publisher()
    publisher.put(change(1))
    reader = setup.reader()
    for frames in ([b""], [b"", b""], [b"", b"zzz"], [b"a", b"b", b"c", b"d"], [b"x" * 5000]):
        reader.replays.send_multipart(frames)
    other = setup.reader()
    assert [values(payload) for _, payload in other.replay(0)] == [[1]]


class Held:
    """A broadcast that keeps its thread waiting as long as the gate is shut."""

    def __init__(self, broadcast: PublishChannel) -> None:
        self._broadcast = broadcast
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broadcast, name)

    def wait(self, timeout_s: float) -> None:
        self._broadcast.wait(timeout_s)
        self.gate.wait()


def test_what_was_put_is_published_before_the_sockets_close(setup: Setup) -> None:
    held = Held(setup.broadcast())
    publisher = Publisher(held, page_size=2, replica=1)  # type: ignore[arg-type]
    reader = setup.reader()
    last = meet(publisher, reader)
    held.gate.clear()
    for i in range(500):
        publisher.put(change(i))
    threading.Timer(0.05, held.gate.set).start()
    publisher.close()
    assert [reader.receive()[0] for _ in range(500)] == list(range(last + 1, last + 501))


def test_a_thread_that_failed_is_heard_of(setup: Setup) -> None:
    publisher = setup.publisher()
    publisher.put([Removed("GPU", b"no digest")])

    def go_on() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            publisher.put(change(1))

    with pytest.raises(InvariantError, match="publisher of KV events") as raised:
        go_on()
    assert raised.value.__cause__ is not None


# --- addresses ----------------------------------------------------------------------------


def refused(events: str, replays: str | None = None) -> ResourceError:
    with pytest.raises(ResourceError) as raised:
        PublishChannel(events, replays, setting="kv_events", questions_setting="kv_events_replay")
    return raised.value


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = refused(endpoint)
    assert error.message == (
        f"--kv-events cannot use {endpoint}: Address already in use. "
        "Stop the program that uses it, if any, or choose another."
    )
    assert error.param == "kv_events"


def test_a_refused_replay_gives_the_events_address_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = refused(f"ipc://{tmp_path}/events", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert error.param == "kv_events_replay"
    assert error.message.startswith("--kv-events-replay cannot use tcp://127.0.0.1:")
    assert list(tmp_path.iterdir()) == []


def test_a_path_in_use_is_not_taken_from_who_uses_it(setup: Setup) -> None:
    publisher = setup.publisher()
    assert "Address already in use" in refused(setup.events).message
    reader = setup.reader()
    meet(publisher, reader)


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    precious = tmp_path / "notes.txt"
    precious.write_text("precious")
    assert "File exists" in refused(f"ipc://{precious}").message
    assert precious.read_text() == "precious"


def test_a_socket_that_a_killed_server_left_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    PublishChannel(f"ipc://{path}", None, setting="kv_events", questions_setting="kv_events_replay").close()


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all", "tcp://192.0.2.1:5557", "ipc:///tmp/" + "x" * 200])
def test_an_address_that_cannot_be_used_is_refused(endpoint: str) -> None:
    assert refused(endpoint).message.startswith(f"--kv-events cannot use {endpoint}: ")


def test_the_loopback_of_the_sixth_version_can_be_used() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port = probe.getsockname()[1]
    PublishChannel(f"tcp://[::1]:{port}", None, setting="kv_events", questions_setting="kv_events_replay").close()


def test_the_high_water_mark_of_answers_holds_a_whole_replay() -> None:
    assert channel.MAX_UNREAD_ANSWERS > MAX_KEPT_BATCHES
