"""Seals of thoughts, which a later request returns, and seeds of requests without one: both are made with a secret (``--seal-key``)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode

from hiserve.core.request import MAX_SEED

_MAC_BYTES = 32


class Seals:
    """Makes and opens seals. A seal is a text, not encrypted, and its authentication code under a secret.

    Args:
        secret: ``--seal-key``; None draws one, so that seals are valid as long as the process.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = secrets.token_bytes(32) if secret is None else hashlib.sha256(secret.encode()).digest()

    def seal(self, text: str) -> str:
        """Returns the seal of a text, base64 of its code and UTF-8."""
        raw = text.encode()
        return urlsafe_b64encode(self._code(raw) + raw).decode()

    def open(self, seal: str) -> str | None:
        """Returns the sealed text; None if the seal was not made with this secret."""
        try:
            opened = urlsafe_b64decode(seal)
        except ValueError:
            return None
        code, raw = opened[:_MAC_BYTES], opened[_MAC_BYTES:]
        return raw.decode() if hmac.compare_digest(code, self._code(raw)) else None

    def _code(self, raw: bytes) -> bytes:
        return hmac.digest(self._key, raw, "sha256")


class Seeds:
    """Draws seeds from ids of requests: a request that is sent again, to any server with the same secret, draws the same.

    Args:
        secret: ``--seal-key``; None draws one, so that seeds are those of this process alone.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = secrets.token_bytes(32) if secret is None else hashlib.sha256(secret.encode()).digest()

    def draw(self, tag: str, choice: int) -> int:
        """Returns a seed, evenly from 0 to ``MAX_SEED``.

        Args:
            tag: Of caller and ``x-request-id`` (``http.auth.tag_of``).
            choice: Index of the prompt's first choice in the reply.
        """
        message = f"seed:{choice}:{tag}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(message, digest_size=8, key=self._key).digest()) & MAX_SEED
