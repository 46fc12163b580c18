"""Which store a configuration names, and whose secret goes into its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiserve.cache.storage.cache_identity import server_secret
from hiserve.cache.storage.file_store import FileStore, open_store, secret_of
from hiserve.cache.storage.store_directory import MARKER
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
    assert store.put(keys, [memoryview(bytes(2**20))] * 3) == 3
    assert store.stats().num_pages == 1  # each takes its header, too
    assert (tmp_path / "new" / MARKER).exists()


@pytest.mark.parametrize("store", ["redis:host", "file:", "/var/cache", "file", ""])
def test_a_store_of_another_kind_is_refused_with_what_there_is(store: str) -> None:
    with pytest.raises(ConfigError, match="file:DIR") as caught:
        open_store(make_options(store=store).cache)
    assert caught.value.param == "store"
    assert repr(store) in caught.value.message


def test_servers_of_one_store_share_a_secret_that_others_do_not_have(tmp_path: Path) -> None:
    one, two, other = (f"file:{tmp_path}/{name}" for name in ("a", "a", "b"))
    assert secret_of(one) == secret_of(two) != secret_of(other)
    assert open_store(make_options(store=one).cache) is not None  # the secret is no stranger there


def test_the_secret_of_a_directory_that_is_no_store_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all there is")
    with pytest.raises(ConfigError, match="no store"):
        secret_of(f"file:{tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_store_gives_the_secret_of_the_namespace_even_where_the_segment_has_a_name(tmp_path: Path) -> None:
    stored = make_options(store=f"file:{tmp_path}/a", dtype="float32")
    named = make_options(store=f"file:{tmp_path}/a", dtype="float32", host_cache_name="n")
    assert server_secret(named, tmp_path) == server_secret(stored) == secret_of(f"file:{tmp_path}/a")
    assert namespace_of(named, tmp_path) == namespace_of(stored)
    others = (make_options(dtype="float32"), make_options(store=f"file:{tmp_path}/b", dtype="float32"))
    assert namespace_of(stored) not in [namespace_of(other) for other in others]
