"""Opens the store of a configuration."""

from __future__ import annotations

from pathlib import Path

from hiserve.cache.storage.file_store import FileStore, store_secret
from hiserve.cache.storage.store import PageStore
from hiserve.config.options import Cache
from hiserve.core.machine import GIB
from hiserve.errors import ConfigError


def open_store(cache: Cache) -> PageStore | None:
    """Opens the store that ``--store`` names; None without one.

    Raises:
        ConfigError: It names none, or one that cannot be used.
    """
    return None if cache.store is None else FileStore(_directory(cache.store), int(cache.store_gib * GIB))


def secret_of(cache: Cache) -> bytes:
    """Returns the secret that is kept with the store, so that its pages are found when it is opened again.

    Raises:
        ConfigError: As ``open_store``.
    """
    assert cache.store is not None, "no store keeps a secret"
    return store_secret(_directory(cache.store))


def _directory(store: str) -> Path:
    """Returns the DIR of ``file:DIR``; ``~`` is the user's home."""
    scheme, _, directory = store.partition(":")
    if scheme != "file" or not directory:
        raise ConfigError(f"--store is {store!r}; the one kind is file:DIR.", param="store")
    return Path(directory).expanduser().absolute()
