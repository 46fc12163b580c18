"""Token ids to text while they arrive: what is shown never changes later."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hiserve.errors import ModelError
from hiserve.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one stream of tokens into text.

    The texts returned, joined, equal the tokenizer's decoding of all the tokens, whatever the chunks.
    """

    def push(self, ids: Iterable[int]) -> str:
        """Takes tokens and returns the text that is now certain; may be empty."""

    def flush(self) -> str:
        """Returns what is left at the end; the stream takes no more tokens."""


class Spelling:
    """What each token id adds to a text, and the rule that joins the pieces.

    Two rules cover the supported models. *Byte level* (GPT-2, Llama 3, Qwen): each character of a token
    stands for one byte, and the bytes of all tokens make UTF-8. *Byte fallback* (SentencePiece: Llama 2):
    tokens are text with ``▁`` for a space, and ``<0xE2>`` is one byte of a character without a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Builds the table.

        Raises:
            ModelError: The decoder of the tokenizer follows neither rule.
        """
        parts = tokenizer.decoder.get("decoders", [tokenizer.decoder])
        kinds = [part.get("type", "none") for part in parts]
        self._is_byte_level = kinds == ["ByteLevel"]
        if not self._is_byte_level and kinds not in (
            ["Replace", "ByteFallback", "Fuse"],
            ["Replace", "ByteFallback", "Fuse", "Strip"],
        ):
            raise ModelError(
                f"the decoder of tokenizer.json is {' + '.join(kinds)}; supported are ByteLevel and "
                "Replace + ByteFallback + Fuse [+ Strip].",
                param="model",
            )
        self._num_strip = _leading_spaces_to_strip(parts[-1])
        spell = _spell_byte_level(_byte_alphabet()) if self._is_byte_level else _spell_byte_fallback(parts[0])
        self._pieces = [b""] * (1 + max(tokenizer.vocab, default=0))
        self._byte_ids = set()
        for index, token in tokenizer.vocab.items():
            if index not in tokenizer.hidden_ids:
                self._pieces[index] = spell(token)
                if not self._is_byte_level and _is_byte_token(token):
                    self._byte_ids.add(index)

    def detokenizer(self) -> Detokenizer:
        """Returns a detokenizer for one new stream."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._pieces)
        return ByteFallbackDetokenizer(self._pieces, self._byte_ids, num_strip=self._num_strip)


class ByteLevelDetokenizer:
    """Joins bytes and shows each character once it is complete."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes tokens and returns the complete characters."""
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[i] for i in ids if i < len(pieces)]))

    def flush(self) -> str:
        """Returns replacement characters for an unfinished character, if there is one."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Shows text tokens at once and holds back runs of byte tokens until they end.

    A run that is not UTF-8 as a whole becomes one replacement character a byte, so no part of it is
    certain earlier.
    """

    __slots__ = ("_byte_ids", "_num_strip", "_pieces", "_run")

    def __init__(self, pieces: list[bytes], byte_ids: set[int], *, num_strip: int) -> None:
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._num_strip = num_strip
        self._run = bytearray()

    def push(self, ids: Iterable[int]) -> str:
        """Takes tokens and returns everything before an open run of byte tokens."""
        shown = []
        for index in ids:
            piece = self._pieces[index] if index < len(self._pieces) else b""
            if index in self._byte_ids:
                self._run += piece
            elif piece:
                shown += [self._end_run(), piece.decode()]
        return self._stripped("".join(shown))

    def flush(self) -> str:
        """Returns the open run of byte tokens."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Drops the first ``num_strip`` spaces of the whole stream."""
        if not self._num_strip or not text:
            return text
        num_spaces = len(text) - len(text.lstrip(" "))
        dropped = min(self._num_strip, num_spaces)
        self._num_strip = self._num_strip - dropped if num_spaces == len(text) else 0
        return text[dropped:]


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level BPE (GPT-2): printable bytes are themselves, the rest start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _spell_byte_level(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()  # an added token, spelled as it is

    return spell


def _spell_byte_fallback(replace: dict[str, Any]) -> Callable[[str], bytes]:
    mark, space = replace["pattern"].get("String", "▁"), replace["content"]

    def spell(token: str) -> bytes:
        if _is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return str(token.replace(mark, space)).encode()

    return spell


def _is_byte_token(token: str) -> bool:
    hexadecimal = "0123456789abcdefABCDEF"
    is_framed = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return is_framed and all(char in hexadecimal for char in token[3:5])


def _leading_spaces_to_strip(last: dict[str, Any]) -> int:
    if last.get("type") != "Strip":
        return 0
    if last["content"] != " " or last["stop"] != 0:
        raise ModelError(f"the decoder of tokenizer.json strips {last!r}; only leading spaces may be.", param="model")
    return int(last["start"])
