"""A model's tokenizer: text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from hiserve.core.plan import Int32Array
from hiserve.errors import ModelError
from hiserve.text.tokens.convert import convert


class Tokenizer:
    """One model's tokenizer. Thread-safe.

    Attributes:
        vocab: Token strings by id, special and added ones included.
        hidden_ids: Tokens that texts do not show: the special ones and the model's end tokens.
        max_token_chars: Length of the longest token string, in characters.
        is_concatenative: The ids of two texts, joined, decode to both texts joined. False for tokenizers that add a
            space before every text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
        special = (index for index, token in backend.get_added_tokens_decoder().items() if token.special)
        self.hidden_ids = frozenset(special) | frozenset(eos_token_ids)
        self.max_token_chars = max(map(len, self.vocab.values()), default=1)
        first, second = (self.encode(text, add_special_tokens=False) for text in ("up", "on"))
        self.is_concatenative = self.decode([*first, *second], skip_hidden=False) == "upon"

    @classmethod
    def load(cls, folder: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Reads ``tokenizer.json``, or converts another tokenizer.

        Raises:
            ModelError: There is no tokenizer, or it cannot be read or converted.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls(convert(folder), eos_token_ids)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ModelError(f"tokenizer.json in {str(folder)!r} cannot be read: {error}.", param="model") from error
        return cls(backend, eos_token_ids)

    @property
    def description(self) -> str:
        """All of it, in the form of ``tokenizer.json``."""
        return str(self._backend.to_str())

    def without_hidden_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns generated ids without trailing tokens that show no text, such as the end token."""
        end = len(ids)
        while end and ids[end - 1] in self.hidden_ids:
            end -= 1
        return ids[:end]

    @property
    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found in a text before it is split."""
        return list(self._backend.get_added_tokens_decoder().values())

    def words(self, text: str) -> list[str]:
        """Returns the words within which tokens are formed; the whole text if the tokenizer does not split it."""
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return [normalized] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(normalized)]

    @cached_property
    def around(self) -> tuple[list[int], list[int]] | None:
        """Ids that the tokenizer puts before and after a text; None if they differ from text to text."""
        bare, whole = (self.encode("x", add_special_tokens=adds).tolist() for adds in (False, True))
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    @property
    def decoder(self) -> dict[str, Any]:
        """The decoder's description, as in ``tokenizer.json``; empty if there is none."""
        decoder = self._backend.decoder
        description: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
        return description

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32Array:
        """Returns the token ids of a text without lone surrogates, int32 ``[n]``. Releases the GIL.

        Special tokens that are spelled out in the text become their ids. ``add_special_tokens`` adds the tokens that
        the tokenizer puts around a text (such as a start token); chat templates spell these out themselves.
        """
        # One text as a batch: the library's call for single texts holds the GIL and computes offsets.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | Int32Array, *, skip_hidden: bool = True) -> str:
        """Returns the text of token ids; unknown ids add nothing, invalid UTF-8 becomes replacement characters.

        ``skip_hidden`` omits ``hidden_ids``.
        """
        chosen = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if skip_hidden:
            chosen = [index for index in chosen if index not in self.hidden_ids]
        return self._backend.decode(chosen, skip_special_tokens=False)
