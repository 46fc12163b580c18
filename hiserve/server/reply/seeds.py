"""Seeds of requests without one, from their ids: a request that is sent again, to any server with the same secret, draws the same."""

from __future__ import annotations

import hashlib
import secrets

from hiserve.core.request import MAX_SEED


class Seeds:
    """Draws seeds.

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
