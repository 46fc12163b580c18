"""The stores that ``--store`` names, and the secrets that go into the keys of their pages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from hiserve.cache.storage.file_store import MARKER, FileStore, claim
from hiserve.cache.storage.resp import Endpoint
from hiserve.cache.storage.store import SECRET_BYTES, PageStore, read_secret
from hiserve.config.caching import Cache
from hiserve.core.machine import GIB
from hiserve.errors import ConfigError

KINDS = "file:DIR, or valkey://HOST:PORT or valkeys://HOST:PORT (with TLS), several of which are separated by commas"
SCHEMES = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
MAX_SECRET_BYTES = 4096


def open_store(cache: Cache) -> PageStore | None:
    """Opens the store that ``--store`` names; None without one.

    Raises:
        ConfigError: It names none, or one that cannot be used; a server that does not answer is no error.
    """
    if cache.store is None:
        return None
    if not _is_network(cache.store):
        return FileStore(_directory_of(cache.store), int(cache.store_gib * GIB))
    endpoints = endpoints_of(cache.store)
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "--store: a store on the network needs the extra valkey: pip install hiserve[valkey]", param="store"
        )
    kind: Any = importlib.import_module("hiserve.cache.storage.valkey_store").ValkeyStore
    store: PageStore = kind(endpoints, secret_of(cache), cache.store_timeout_s)
    return store


def secret_of(cache: Cache) -> bytes:
    """Returns the secret of the servers that share a store (``--store``), 32 bytes.

    Raises:
        ConfigError: ``--store`` names none, its directory cannot be used, or there is no secret that can.
    """
    assert cache.store is not None, "no store"
    path = cache.store_secret_file
    if _is_network(cache.store):
        if path is None:
            raise ConfigError(
                "--store is on the network, where others may write pages: servers that share it need a secret. Write at least "
                "32 random bytes to a file that its user alone can read, on each host, and name it with --store-secret-file.",
                param="store_secret_file",
            )
        return _read_shared_secret(Path(path).expanduser())
    if path is not None:
        raise ConfigError(
            "--store-secret-file is for stores on the network; a directory keeps its own secret. Leave it out.",
            param="store_secret_file",
        )
    directory = _directory_of(cache.store)
    claim(directory)
    return read_secret(directory / f"{MARKER}.secret")


def endpoints_of(store: str) -> list[Endpoint]:
    """Returns the servers of a ``--store`` on the network.

    Raises:
        ConfigError: One has another form.
    """
    endpoints = [_endpoint(one.strip(), store) for one in store.split(",")]
    if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
        raise ConfigError(
            f"--store is {store[:200]!r}, which names a server twice. Name each server once.", param="store"
        )
    return endpoints


def _is_network(store: str) -> bool:
    """Whether a store is on the network; False for a directory, and for what is no store."""
    return store.partition("://")[0] in SCHEMES


def _endpoint(address: str, store: str) -> Endpoint:
    try:
        url = urlsplit(address)
        port = Endpoint("").port if url.port is None else url.port
        (url.hostname or "").encode("idna")  # as for its look-up, which raises the same error
        options = dict(parse_qsl(url.query, strict_parsing=True)) if url.query else {}
        database = int(url.path.strip("/") or 0)
    except ValueError:
        raise _no_store(store) from None
    if url.scheme not in SCHEMES or not url.hostname or not port or url.fragment or database < 0:
        raise _no_store(store)
    _check_options(url, options)
    return Endpoint(
        host=url.hostname,
        port=port,
        has_tls=SCHEMES[url.scheme],
        user=url.username or "",
        password_file=_file(options, "password_file"),
        ca_file=_file(options, "ca_file"),
        database=database,
    )


def _check_options(url: SplitResult, options: dict[str, str]) -> None:
    unknown = sorted(options.keys() - {"password_file", "ca_file"})
    if url.password is not None:
        raise ConfigError(
            "--store has a password, which other users and /server_info would see. Write it to a file, and give "
            "?password_file=PATH after the address.",
            param="store",
        )
    if unknown:
        raise ConfigError(
            f"--store has the option {unknown[0][:100]!r}; there are password_file and ca_file.", param="store"
        )
    if "ca_file" in options and not SCHEMES[url.scheme]:
        raise ConfigError("--store has a ca_file without TLS; write valkeys:// for TLS.", param="store")


def _file(options: dict[str, str], name: str) -> Path | None:
    """Returns the file that an option names.

    Raises:
        ConfigError: It cannot be read.
    """
    if name not in options:
        return None
    path = Path(options[name]).expanduser().absolute()
    if not os.access(path, os.R_OK):
        raise ConfigError(f"--store: the {name} {str(path)!r} cannot be read.", param="store")
    return path


def _read_shared_secret(path: Path) -> bytes:
    """Returns 32 bytes that stand for the secret in a file.

    Raises:
        ConfigError: The file cannot be read, others can read it, or it is too short.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(MAX_SECRET_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"--store-secret-file: {str(path)!r} cannot be read: {error.strerror}.", param="store_secret_file"
        ) from None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(
            f"--store-secret-file: {str(path)!r} must be a file that its user alone can open: chmod 600 {path}",
            param="store_secret_file",
        )
    if not SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"--store-secret-file: {str(path)!r} must have {SECRET_BYTES} to {MAX_SECRET_BYTES} bytes. Make one with: "
            f"head -c 32 /dev/urandom > {path}",
            param="store_secret_file",
        )
    return hashlib.sha256(b"hiserve store secret\0" + secret).digest()


def _directory_of(store: str) -> Path:
    """Returns the DIR of ``file:DIR``; ``~`` is the user's home.

    Raises:
        ConfigError: It has another form.
    """
    scheme, _, directory = store.partition(":")
    if scheme != "file" or not directory:
        raise _no_store(store)
    return Path(directory).expanduser().absolute()


def _no_store(store: str) -> ConfigError:
    return ConfigError(f"--store is {store[:200]!r}; give {KINDS}.", param="store")
