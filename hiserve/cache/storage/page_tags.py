"""Authentication of pages on a medium that others can write: AES-GMAC tags under the secret of the servers that share it."""

from __future__ import annotations

import hmac
import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC = b"hisv-g1\0"
_NONCE_BYTES, _TAG_BYTES = 12, 16
_HEADER = struct.Struct(f"<8sQ{_NONCE_BYTES}s{_TAG_BYTES}s")  # magic, bytes of the page, nonce, tag
HEADER_BYTES = _HEADER.size


class PageTags:
    """Makes and verifies the headers of pages.

    The key of a tag is derived from the secret and the page's own key, so that no page passes for another; the nonce is
    random. A tag is no encryption: a reader of the medium reads the pages.

    Args:
        secret: Of the servers that share the medium, 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"hiserve page tags", "sha256")

    def seal(self, key: bytes, page: memoryview) -> bytes:
        """Returns the header of a page, ``HEADER_BYTES`` bytes."""
        nonce = os.urandom(_NONCE_BYTES)
        return _HEADER.pack(_MAGIC, page.nbytes, nonce, self._cipher(key).encrypt(nonce, b"", page))

    def is_intact(self, key: bytes, header: bytes | bytearray, page: memoryview) -> bool:
        """Whether a server with this secret wrote this header and page under the key. Reads the whole page."""
        magic, size, nonce, tag = _HEADER.unpack(header)
        if magic != _MAGIC or size != page.nbytes:
            return False
        try:
            self._cipher(key).decrypt(nonce, tag, page)
        except InvalidTag:
            return False
        return True

    def _cipher(self, key: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._secret, key, "sha256"))
