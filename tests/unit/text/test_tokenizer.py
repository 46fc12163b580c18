"""Loading, encoding and decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hiserve.errors import ModelError
from hiserve.text.tokenizer import Tokenizer
from tests.helpers import tiny_text


def test_a_missing_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"version": "1.0", "model": {"type": "Nope"}}', b"\xff\xfe"])
def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json .* cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_saved_tokenizer_loads_and_round_trips(tmp_path: Path) -> None:
    tiny_text.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, eos_token_ids=[1])
    ids = tokenizer.encode("größer 日本語 🙂", add_special_tokens=True)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "größer 日本語 🙂"


def test_special_tokens_in_the_text_become_their_ids_and_decode_hidden() -> None:
    tokenizer = tiny_text.byte_level()
    ids = tokenizer.encode("<|user|>hello", add_special_tokens=False)
    assert ids[0] == tiny_text.USER
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_hidden=False) == "<|user|>hello"


def test_stored_truncation_and_padding_do_not_apply() -> None:
    backend = tiny_text.byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    ids = Tokenizer(backend).encode("a small coffee with milk", add_special_tokens=True)
    assert 2 < len(ids) < 64


def test_only_tokenizers_that_add_nothing_in_front_are_concatenative() -> None:
    assert tiny_text.byte_level().is_concatenative
    assert not tiny_text.byte_fallback().is_concatenative
