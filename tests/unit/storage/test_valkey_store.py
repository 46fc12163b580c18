"""The store in Valkey: pages that others wrote, servers that are down, full, slow or lie, several servers, its limits."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hiserve.cache.storage import resp, valkey_store
from hiserve.cache.storage.breaker import MAX_FAILURES, PAUSE_S, Breaker
from hiserve.cache.storage.page_tags import HEADER_BYTES, PageTags
from hiserve.cache.storage.resp import MAX_LINE_BYTES, Argument, Connection, Endpoint
from hiserve.cache.storage.valkey_store import PREFIX, ValkeyStore
from tests.helpers.clock import Clock
from tests.helpers.host import make_keys
from tests.helpers.stores import PAGE_BYTES, blanks, page, pages
from tests.helpers.valkey import SECRET, answering, command, free_port, valkey
from tests.helpers.waiting import PATIENCE_S

KEYS = make_keys("x", 6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with valkey(tmp_path_factory.mktemp("valkey")) as endpoint:
        yield endpoint


@pytest.fixture
def store(server: Endpoint) -> Iterator[ValkeyStore]:
    made = ValkeyStore([server], SECRET, PATIENCE_S)
    made.clear()
    yield made
    made.close()


# --- S15: pages of others ------------------------------------------------------------------------


FORGERIES: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "another secret": lambda: (PageTags(bytes(32)).seal(KEYS[1], page(KEYS[1])), bytes(page(KEYS[1]))),
    "another page": lambda: (PageTags(SECRET).seal(KEYS[1], page(KEYS[1])), bytes(page(KEYS[2]))),
    "the page of another key": lambda: (PageTags(SECRET).seal(KEYS[2], page(KEYS[2])), bytes(page(KEYS[2]))),
    "a cut page": lambda: (PageTags(SECRET).seal(KEYS[1], page(KEYS[1])), bytes(page(KEYS[1]))[:-1]),
    "a cut header": lambda: (PageTags(SECRET).seal(KEYS[1], page(KEYS[1]))[:-1], bytes(page(KEYS[1]))),
    "no header": lambda: (bytes(HEADER_BYTES), bytes(page(KEYS[1]))),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_page_that_no_server_of_the_secret_wrote_is_a_counted_miss_and_written_again(
    server: Endpoint, store: ValkeyStore, forgery: str
) -> None:
    store.put(KEYS, pages(KEYS))
    header, content = FORGERIES[forgery]()
    command(server, b"DEL", PREFIX + KEYS[1])
    command(server, b"HSET", PREFIX + KEYS[1], b"h", header, b"p", content)
    assert store.get(KEYS, blanks(6)) == 1
    assert store.stats().num_corrupt == 1
    assert store.put(KEYS, pages(KEYS)) == 6
    buffers = blanks(6)
    assert store.get(KEYS, buffers) == 6
    assert buffers == pages(KEYS)


def test_a_key_of_another_type_is_a_page_that_no_server_wrote(server: Endpoint, store: ValkeyStore) -> None:
    store.put(KEYS, pages(KEYS))
    command(server, b"DEL", PREFIX + KEYS[1])
    command(server, b"LPUSH", PREFIX + KEYS[1], b"x")
    assert store.get(KEYS, blanks(6)) == 1
    assert (store.stats().num_corrupt, store.stats().num_errors) == (1, 0)
    assert store.put(KEYS, pages(KEYS)) == store.get(KEYS, blanks(6)) == 6


def test_nonces_are_fresh() -> None:
    tags = PageTags(SECRET)
    headers = {tags.seal(KEYS[0], page(KEYS[0])) for _ in range(9)}
    assert len(headers) == 9
    assert all(tags.is_intact(KEYS[0], header, page(KEYS[0])) for header in headers)


# --- S16: servers that fail ----------------------------------------------------------------------


def test_a_breaker_pauses_after_failures_in_a_row_and_lets_one_call_try() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES - 1):
        breaker.failed()
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(MAX_FAILURES):
        assert breaker.allows()
        breaker.failed()
    assert not breaker.allows()
    assert breaker.is_paused
    clock.now_s += PAUSE_S
    assert not breaker.is_paused, "its pause is over"
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed()
    assert not breaker.allows()
    clock.now_s += PAUSE_S
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(3))


def test_a_server_that_is_down_is_left_alone_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    clock, port = Clock(), free_port()
    store = ValkeyStore([Endpoint("127.0.0.1", port)], SECRET, PATIENCE_S, clock)
    for _ in range(MAX_FAILURES):
        assert store.get(KEYS, blanks(6)) == 0
    stats = store.stats()
    assert (stats.num_errors, stats.num_paused, stats.num_timeouts) == (MAX_FAILURES, 0, 0)
    assert "refused" in stats.last_error
    assert store.put(KEYS, pages(KEYS)) == store.exists(KEYS) == 0
    assert store.stats().num_errors == MAX_FAILURES, "it was asked again"
    assert store.stats().num_paused > 1
    with valkey(tmp_path, port=port):
        assert store.put(KEYS, pages(KEYS)) == 0, "the pause is over too early"
        clock.now_s += PAUSE_S
        assert store.put(KEYS, pages(KEYS)) == store.get(KEYS, blanks(6)) == 6
    store.close()


def test_a_full_server_takes_no_pages_and_still_gives_them(tmp_path: Path) -> None:
    clock, keys = Clock(), make_keys("f", 20)
    with valkey(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as endpoint:
        store = ValkeyStore([endpoint], SECRET, PATIENCE_S, clock)
        large = [memoryview(bytes(2**20))] * 20
        num_put = store.put(keys, large)
        assert 0 < num_put < 20
        for _ in range(2 * MAX_FAILURES):
            assert store.put(keys, large) == num_put
        stats = store.stats()
        assert stats.num_refused == (1 + 2 * MAX_FAILURES) * (20 - num_put)
        assert stats.num_errors == MAX_FAILURES, "writes to a full server go on"
        assert "OOM" in stats.last_error
        assert store.get(keys, blanks(20, 2**20)) == num_put
        store.close()


LIES = {
    "no protocol": b"HTTP/1.1 200 OK\r\n\r\n",
    "no end of a line": b":" + b"1" * (MAX_LINE_BYTES + 9),
    "no number": b"*x\r\n",
    "another length": b"*1\r\n",
    "an endless value": b"*2\r\n$99999999999999\r\n",
    "a value without an end": b"*2\r\n$%d\r\n%b??" % (HEADER_BYTES, bytes(HEADER_BYTES)),
    "a refusal": b"-NOAUTH Authentication required.\r\n",
    "an end": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_a_miss(lie: str) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(2**20)
        connection.sendall(LIES[lie])
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass

    with answering(answer) as endpoint:
        store = ValkeyStore([endpoint], SECRET, PATIENCE_S)
        assert (
            store.get(KEYS[:1], blanks(1)) == store.exists(KEYS) == store.put(KEYS, pages(KEYS)) == store.clear() == 0
        )
        stats = store.stats()
        assert stats.num_errors + stats.num_corrupt >= 3
        assert stats.num_misses == 1
        store.close()


@pytest.mark.parametrize("size", [b"9" * 900, b"%d" % (2**63 - 1), b"-1"], ids=["digits", "int64", "negative"])
def test_a_server_that_lies_about_its_size_has_none(size: bytes) -> None:
    """Each step of the engine reads the counts, and sends them on in messages of 64-bit numbers."""

    def answer(connection: socket.socket) -> None:
        while asked := connection.recv(2**20):
            connection.sendall(b":%b\r\n" % size if b"DBSIZE" in asked else b":1\r\n")

    with answering(answer) as endpoint:
        store = ValkeyStore([endpoint], SECRET, PATIENCE_S)
        assert store.put(KEYS[:1], pages(KEYS[:1])) == 1
        stats = store.stats()
        assert (stats.num_pages, stats.num_bytes, stats.num_errors) == (0, 0, 1)
        store.close()


def test_calls_of_a_server_that_never_ends_its_answer_are_bounded() -> None:
    """It sends a byte from time to time, so that no wait for a byte is long."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.recv(2**20)
        connection.sendall(b"*2\r\n$%d\r\n" % HEADER_BYTES)
        while not over.wait(0.02):
            connection.sendall(b"x")

    with answering(answer) as endpoint:
        store = ValkeyStore([endpoint], SECRET, timeout_s=0.2)
        assert store.get(KEYS[:1], blanks(1)) == 0
        assert (store.stats().num_timeouts, store.stats().num_errors) == (1, 1)
        store.close()
        over.set()


def test_all_addresses_of_a_host_are_tried_within_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of three answers, as that of a host which drops packets."""
    clock, asked = Clock(), list[str]()

    class Silent(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            asked.append(address[0])
            clock.now_s += self.gettimeout() or 0
            raise TimeoutError

    hosts = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"192.0.2.{index}", 6379)) for index in range(3)]
    monkeypatch.setattr(resp.socket, "getaddrinfo", lambda *_, **__: hosts)
    monkeypatch.setattr(resp.socket, "socket", Silent)
    start_s = clock.now_s
    with pytest.raises(TimeoutError):
        Connection(Endpoint("elsewhere"), 1.5, clock)
    assert asked == ["192.0.2.0", "192.0.2.1", "192.0.2.2"]
    assert clock.now_s - start_s == pytest.approx(1.5)


def test_a_host_answers_at_a_later_address(server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo
    dead = found("127.0.0.1", free_port(), type=socket.SOCK_STREAM)
    monkeypatch.setattr(resp.socket, "getaddrinfo", lambda *given, **named: dead + found(*given, **named))
    Connection(server, PATIENCE_S).close()


# --- TLS, users ------------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> ssl.SSLContext:
    """Returns the side of a server with a new certificate of this name, in ``folder / "ca.pem"``."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    made = x509.CertificateBuilder(issuer, issuer, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    pem = Encoding.PEM
    (folder / "ca.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize("name", ["localhost", "elsewhere"])
def test_tls_verifies_the_name_of_the_server(tmp_path: Path, server: Endpoint, store: ValkeyStore, name: str) -> None:
    """Behind a server of TLS is the real one; the test's build of it speaks no TLS."""
    context = certificate(tmp_path, name)

    def forward(connection: socket.socket) -> None:
        behind = socket.create_connection((server.host, server.port))
        with behind, context.wrap_socket(connection, server_side=True) as front:
            while request := front.recv(2**20):
                behind.sendall(request)
                front.sendall(behind.recv(2**20))

    with answering(forward) as endpoint:
        tls = endpoint._replace(host="localhost", has_tls=True, ca_file=tmp_path / "ca.pem")
        secure = ValkeyStore([tls], SECRET, PATIENCE_S)
        count = secure.put(KEYS[:1], pages(KEYS[:1]))
        assert count == store.exists(KEYS[:1]) == (name == "localhost")
        assert name == "localhost" or "verify failed" in secure.stats().last_error
        secure.close()


# --- several servers, large pages ----------------------------------------------------------------


def test_one_server_of_several_that_dies_costs_its_own_pages_alone(tmp_path: Path, server: Endpoint) -> None:
    keys = make_keys("z", 40)
    dead = Endpoint("127.0.0.1", free_port())
    with valkey(tmp_path, port=dead.port):
        store = ValkeyStore([server, dead], SECRET, PATIENCE_S)
        store.clear()
        assert store.put(keys, pages(keys)) == 40
        assert store.stats().num_pages == 40
    alone = ValkeyStore([server], SECRET, PATIENCE_S)
    left = [key for key in keys if alone.exists([key])]
    assert 8 < len(left) < 32
    assert [key for key in keys if store.get([key], blanks(1))] == left
    for each in (store, alone):
        each.close()


def test_exchanges_have_bounded_sizes(store: ValkeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_store, "MAX_KEYS", 2)
    monkeypatch.setattr(valkey_store, "MAX_BYTES", PAGE_BYTES + 1)
    assert [len(batch) for batch in valkey_store._batches(KEYS, [PAGE_BYTES] * 6)] == [1] * 6
    assert [len(batch) for batch in valkey_store._batches(KEYS, [0] * 6)] == [2] * 3
    assert store.put(KEYS, pages(KEYS)) == store.exists(KEYS) == store.get(KEYS, blanks(6)) == store.clear() == 6


def test_the_start_of_a_prefix_is_used_last_so_that_its_end_is_evicted_first(
    store: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bytes] = []
    send = Connection.send

    def noted(connection: Connection, commands: Sequence[Sequence[Argument]]) -> None:
        used.extend(key.removeprefix(PREFIX) for name, *keys in commands if name == b"TOUCH" for key in keys)
        send(connection, commands)

    store.put(KEYS, pages(KEYS))
    monkeypatch.setattr(Connection, "send", noted)
    monkeypatch.setattr(valkey_store, "MAX_KEYS", 4)
    assert store.get(KEYS[3:], blanks(3), KEYS[:3]) == 3
    assert used == KEYS[::-1]


def test_users_and_passwords(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("word\n")
    with valkey(tmp_path, "--requirepass", "word") as endpoint:
        stranger, friend = (
            ValkeyStore([each], SECRET, PATIENCE_S)
            for each in (endpoint, endpoint._replace(password_file=password, database=3))
        )
        assert stranger.put(KEYS, pages(KEYS)) == 0
        assert "NOAUTH" in stranger.stats().last_error
        assert friend.put(KEYS, pages(KEYS)) == friend.get(KEYS, blanks(6)) == 6
        for each in (stranger, friend):
            each.close()
