"""Incremental detokenization: returned text never changes later."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hiserve.text.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Tokens before the newest ones on which a decoder's text for these may depend.
CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """Converts one stream of tokens to text.

    The returned texts, joined, equal the tokenizer's decoding of all tokens, for any chunking.
    """

    def push(self, ids: Iterable[int]) -> str:
        """Adds tokens and returns the text that is now certain; may be empty."""

    def flush(self) -> str:
        """Ends the stream and returns the remaining text."""


class TokenBytes:
    """The bytes of each token, and the rule that joins them.

    Two rules cover most models. *Byte level* (GPT-2, Llama 3, Qwen): each character of a token
    stands for one byte, and the bytes of all tokens are UTF-8. *Byte fallback* (SentencePiece: Llama 2):
    tokens are text with ``▁`` for a space, and ``<0xE2>`` is one byte of a character without a token.
    Any other tokenizer decodes a window of tokens itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        parts = tokenizer.decoder.get("decoders", [tokenizer.decoder])
        kinds = [part.get("type") for part in parts]
        self._is_byte_level = kinds == ["ByteLevel"]
        self._is_byte_fallback = _is_byte_fallback(parts)
        self._num_strip = parts[-1]["start"] if self._is_byte_fallback and kinds[-1] == "Strip" else 0
        self._byte_ids: set[int] = set()
        if "ByteFallback" in kinds:
            self._byte_ids = {index for index, token in tokenizer.vocab.items() if _is_byte_token(token)}
        self._pieces: list[bytes] = []
        self._visible: list[bytes] = []
        if self._is_byte_level or self._is_byte_fallback:
            spell = _spell_byte_level(_byte_alphabet()) if self._is_byte_level else _spell_byte_fallback(parts[0])
            self._pieces = [b""] * (1 + max(tokenizer.vocab, default=0))
            for index, token in tokenizer.vocab.items():
                self._pieces[index] = spell(token)
            self._visible = list(self._pieces)
            for index in tokenizer.hidden_ids & tokenizer.vocab.keys():
                self._visible[index] = b""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """Returns a detokenizer for a new stream; ``skip_special`` omits the tokenizer's ``hidden_ids``."""
        pieces = self._visible if skip_special else self._pieces
        if self._is_byte_level:
            return ByteLevelDetokenizer(pieces)
        if self._is_byte_fallback:
            return ByteFallbackDetokenizer(pieces, self._byte_ids, num_strip=self._num_strip)
        hidden = self._tokenizer.hidden_ids if skip_special else frozenset[int]()
        return WindowDetokenizer(self._tokenizer, hidden, self._byte_ids)

    def bytes_of(self, index: int) -> bytes:
        """Returns the bytes that a token adds inside a text; b"" for an unknown id. Special tokens are spelled out."""
        if index < len(self._pieces):
            return self._pieces[index]
        if index in self._byte_ids:
            return _byte_of(self._tokenizer.vocab[index])
        once, twice = (self._tokenizer.decode([index] * times, skip_hidden=False) for times in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


class ByteLevelDetokenizer:
    """Joins bytes and returns each character once it is complete."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[i] for i in ids if i < len(pieces)]))

    def flush(self) -> str:
        """Returns replacement characters for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Returns text tokens at once and holds runs of byte tokens back until they end.

    A run that is not UTF-8 as a whole becomes one replacement character per byte, so no part of it is
    certain earlier.
    """

    __slots__ = ("_byte_ids", "_num_strip", "_pieces", "_run")

    def __init__(self, pieces: list[bytes], byte_ids: set[int], *, num_strip: int) -> None:
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._num_strip = num_strip
        self._run = bytearray()

    def push(self, ids: Iterable[int]) -> str:
        """Adds tokens and returns the text before an open run of byte tokens."""
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


class WindowDetokenizer:
    """Decodes a window of the newest tokens and returns the text after the part already returned.

    It serves decoders of which only one fact is known: a token's text depends on the tokens just before it.
    A text that ends in a replacement character, or within a run of byte tokens, may still change and is held back.
    """

    __slots__ = ("_byte_ids", "_hidden", "_ids", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], byte_ids: set[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._byte_ids = byte_ids
        self._ids: list[int] = []
        self._shown = ""  # the part of the window's text that was returned

    def push(self, ids: Iterable[int]) -> str:
        vocab = self._tokenizer.vocab
        self._ids += [index for index in ids if index in vocab and index not in self._hidden]
        text = self._decoded()
        is_open = not self._ids or self._ids[-1] in self._byte_ids or text.endswith(REPLACEMENT)
        if is_open or len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        del self._ids[:-CONTEXT_TOKENS]
        self._shown = self._decoded()
        return new

    def flush(self) -> str:
        return self._decoded()[len(self._shown) :]

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_hidden=False)


def _is_byte_fallback(parts: list[dict[str, Any]]) -> bool:
    """Whether a decoder is SentencePiece's usual sequence, with or without stripping of leading spaces."""
    kinds = [part.get("type") for part in parts]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or "String" not in parts[0]["pattern"]:
        return False
    if kinds[3:] == ["Strip"]:
        return bool(parts[3]["content"] == " " and parts[3]["stop"] == 0)
    return not kinds[3:]


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level BPE (GPT-2): printable bytes are themselves, the others start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _spell_byte_level(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token
            return token.encode()

    return spell


def _spell_byte_fallback(replace: dict[str, Any]) -> Callable[[str], bytes]:
    pattern, space = replace["pattern"]["String"], replace["content"]

    def spell(token: str) -> bytes:
        return _byte_of(token) if _is_byte_token(token) else str(token.replace(pattern, space)).encode()

    return spell


def _is_byte_token(token: str) -> bool:
    hexadecimal = "0123456789abcdefABCDEF"
    is_framed = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return is_framed and all(char in hexadecimal for char in token[3:5])


def _byte_of(token: str) -> bytes:
    return bytes([int(token[3:5], 16)])
