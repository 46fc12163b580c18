"""Keys of pages in a store, and the secret that keeps one server's keys from another's."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from hiserve.errors import ConfigError

KEY_BYTES = 32
SECRET_BYTES = 32


def store_key(digest: bytes, draft_revision: int = 0) -> bytes:
    """Returns the key of a page in a store.

    A store finds a page by its key alone, where the radix tree compares tokens. So the digest must be of
    ``core.digest.strong_chain``, which covers everything before the page; and since the secret is in the namespace that
    the chain starts from, who does not know it cannot tell what a key stands for.

    Args:
        digest: 16 bytes. The page's.
        draft_revision: Of the draft head that wrote the draft part, 0 to 2**64 - 1; 0 where it is not valid.
    """
    return hashlib.sha256(b"hiserve page\0" + draft_revision.to_bytes(8, "little") + digest).digest()


def read_secret(path: Path) -> bytes:
    """Returns the secret in a private file, which is made when it is missing.

    Several servers may start at once: all get the same secret.

    Args:
        path: Beside the store or the named segment whose keys it protects.

    Raises:
        ConfigError: The file is not private to this user, has not the right length, or cannot be made.
    """
    try:
        if not path.exists():
            _make_secret(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the cache secret {path} cannot be used: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"the cache secret {path} must be a file that this user alone can open: chmod 600 {path}")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"the cache secret {path} must hold {SECRET_BYTES} bytes. Delete it, and the cache with it.")
    return secret


def _make_secret(path: Path) -> None:
    """Writes a new secret beside its place and links it there; whoever comes first wins."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # another server was faster
    finally:
        draft.unlink()
