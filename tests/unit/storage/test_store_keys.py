"""Keys of a store, and the secret behind them."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from hiserve.cache.storage.store import KEY_BYTES, SECRET_BYTES, read_secret, store_key
from hiserve.core.digest import namespace_digest, pack_tokens, strong_chain
from hiserve.errors import ConfigError

DIGESTS = strong_chain(namespace_digest("model", b"tenant"), pack_tokens(np.arange(40)), 16)


def test_every_page_and_draft_revision_has_a_key_of_its_own() -> None:
    keys = [store_key(digest, revision) for digest in DIGESTS for revision in (0, 1, 2**64 - 1)]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys)) == 6
    assert keys[0] == store_key(DIGESTS[0])


def test_a_key_stays_the_same_from_server_to_server_and_does_not_show_its_digest() -> None:
    assert store_key(bytes(16)) == hashlib.sha256(b"hiserve page\0" + bytes(24)).digest()
    assert DIGESTS[0] not in store_key(DIGESTS[0])


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = read_secret(path)
    assert len(secret) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(path) == secret
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert read_secret(tmp_path / "other") != secret


def test_servers_that_start_at_once_share_the_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(read_secret(tmp_path / "secret"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    read_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize("found", [b"", b"x" * 31, b"x" * 33])
def test_a_secret_of_the_wrong_length_is_refused(tmp_path: Path, found: bytes) -> None:
    (tmp_path / "secret").write_bytes(found)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(ConfigError, match="32 bytes"):
        read_secret(tmp_path / "secret")


def test_a_secret_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "nowhere" / "secret")
