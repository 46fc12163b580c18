"""Which store a configuration names, and whose secret goes into its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiserve.cache.storage.cache_identity import server_secret
from hiserve.cache.storage.file_store import MARKER, FileStore
from hiserve.cache.storage.resp import Endpoint
from hiserve.cache.storage.store_address import endpoints_of, open_store, secret_of
from hiserve.cache.storage.valkey_store import ValkeyStore
from hiserve.config.options import make_options
from hiserve.errors import ConfigError
from tests.helpers.host import make_keys
from tests.helpers.settings import namespace_of


def test_no_store_is_opened_without_a_name() -> None:
    assert open_store(make_options().cache) is None


def test_a_directory_is_a_store_of_its_size(tmp_path: Path) -> None:
    cache = make_options(store=f"file:{tmp_path}/new", store_gib=2 / 1024).cache
    store = open_store(cache)
    assert isinstance(store, FileStore)
    keys = make_keys("a", 3)
    assert store.put(keys, [memoryview(bytes(2**20))] * 3) == 1
    assert (
        store.stats().num_pages == 1
    )  # each takes its header, too; the first is kept, without which the others are of no use
    assert (tmp_path / "new" / MARKER).exists()


@pytest.mark.parametrize("store", ["redis:host", "file:", "/var/cache", "file", ""])
def test_a_store_of_another_kind_is_refused_with_what_there_is(store: str) -> None:
    with pytest.raises(ConfigError, match="file:DIR") as caught:
        open_store(make_options(store=store).cache)
    assert caught.value.param == "store"
    assert repr(store) in caught.value.message


def test_servers_of_one_store_share_a_secret_that_others_do_not_have(tmp_path: Path) -> None:
    one, two, other = (f"file:{tmp_path}/{name}" for name in ("a", "a", "b"))
    secrets = [secret_of(make_options(store=store).cache) for store in (one, two, other)]
    assert secrets[0] == secrets[1] != secrets[2]
    assert open_store(make_options(store=one).cache) is not None  # the secret is no stranger there


def test_the_secret_of_a_directory_that_is_no_store_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all there is")
    with pytest.raises(ConfigError, match="no store"):
        secret_of(make_options(store=f"file:{tmp_path}").cache)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_store_gives_the_secret_of_the_namespace_even_where_the_segment_has_a_name(tmp_path: Path) -> None:
    stored = make_options(store=f"file:{tmp_path}/a", dtype="float32")
    named = make_options(store=f"file:{tmp_path}/a", dtype="float32", host_cache_name="n")
    assert server_secret(named, tmp_path) == server_secret(stored) == secret_of(stored.cache)
    assert namespace_of(named, tmp_path) == namespace_of(stored)
    others = (make_options(dtype="float32"), make_options(store=f"file:{tmp_path}/b", dtype="float32"))
    assert namespace_of(stored) not in [namespace_of(other) for other in others]


# --- stores on the network -----------------------------------------------------------------------


def secret_file(folder: Path, content: bytes = bytes(32), mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_servers_of_a_store_on_the_network(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch()
    assert endpoints_of("valkey://one") == [Endpoint("one", 6379)]
    given = f"valkeys://me@one:7000/2?password_file={password}&ca_file={password}, redis://[::1]:7001"
    one, other = endpoints_of(given)
    assert one == Endpoint("one", 7000, True, "me", password, password, 2)
    assert other == Endpoint("::1", 7001)


def test_a_store_on_the_network_opens_without_its_server(tmp_path: Path) -> None:
    cache = make_options(store="valkey://127.0.0.1:1", store_secret_file=secret_file(tmp_path)).cache
    store = open_store(cache)
    assert isinstance(store, ValkeyStore)
    assert store.exists(make_keys("a", 3)) == 0
    store.close()


@pytest.mark.parametrize(
    ("store", "fault"),
    [
        ("valkey://", "file:DIR, or valkey"),
        ("valkey://one:x", "file:DIR, or valkey"),
        ("valkey://one:70000", "file:DIR, or valkey"),
        ("valkey://one:0", "file:DIR, or valkey"),
        ("valkey://one..two", "file:DIR, or valkey"),
        ("valkey://one,valkey://one:6379/1", "a server twice"),
        ("valkey://one/x", "file:DIR, or valkey"),
        ("valkey://one,two", "file:DIR, or valkey"),
        ("valkey://one,file:here", "file:DIR, or valkey"),
        ("valkey://one?x", "file:DIR, or valkey"),
        ("valkey://one?db=1", "'db'"),
        ("valkey://:word@one", "password_file=PATH"),
        ("valkey://one?password_file=/nowhere", "/nowhere"),
        ("valkey://one?ca_file=/dev/null", "valkeys://"),
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path: Path, store: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(make_options(store=store, store_secret_file=secret_file(tmp_path)).cache)
    assert caught.value.param == "store"
    assert fault in caught.value.message
    assert "word@" not in caught.value.message


def test_a_store_on_the_network_needs_a_secret_that_its_user_alone_can_read(tmp_path: Path) -> None:
    store = "valkey://127.0.0.1:1"
    cases: list[tuple[str | None, str]] = [
        (None, "32 random bytes"),
        (str(tmp_path), "directory"),
        ("/nowhere/x", "cannot be read"),
    ]
    for given, fault in cases:
        with pytest.raises(ConfigError, match=fault) as caught:
            secret_of(make_options(store=store, store_secret_file=given).cache)
        assert caught.value.param == "store_secret_file"
    for content, mode, fault in (
        (bytes(31), 0o600, "32 to 4096 bytes"),
        (bytes(32), 0o640, "chmod 600"),
        (bytes(5000), 0o600, "32 to"),
    ):
        with pytest.raises(ConfigError, match=fault):
            secret_of(make_options(store=store, store_secret_file=secret_file(tmp_path, content, mode)).cache)
    with pytest.raises(ConfigError, match="keeps its own secret"):
        secret_of(make_options(store=f"file:{tmp_path}/a", store_secret_file=secret_file(tmp_path)).cache)


def test_hosts_with_one_secret_and_model_have_one_namespace(tmp_path: Path) -> None:
    """S14: wherever the secret lies, and whichever servers hold the pages."""
    (tmp_path / "b").mkdir()
    options = [
        make_options(store=store, store_secret_file=secret_file(folder, content), dtype="float32")
        for store, folder, content in (
            ("valkey://one", tmp_path, bytes(32)),
            ("valkeys://two,valkeys://three", tmp_path / "b", bytes(32)),
        )
    ]
    assert namespace_of(options[0]) == namespace_of(options[1])
    secret_file(tmp_path / "b", bytes(31) + b"x")
    assert namespace_of(options[0]) != namespace_of(options[1])
