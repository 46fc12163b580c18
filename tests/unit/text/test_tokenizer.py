"""Loading, encoding and decoding."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from hiserve.errors import ModelError
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text


def test_a_missing_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json and no other tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_model_is_converted(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_text.CORPUS),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
    tokenizer = Tokenizer.load(tmp_path, eos_token_ids=[2])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ["I would like a coffee", "größer 🙂 zzz 日本", "two  spaces ", "a\nb"]:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert ids == oracle.encode(text)
        detokenizer = TokenBytes(tokenizer).detokenizer()
        assert (
            "".join([detokenizer.push([index]) for index in ids]) + detokenizer.flush() == text == tokenizer.decode(ids)
        )


def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenization_own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    auto = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto}))
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"cannot be converted: .*Save it in the fast format"):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install hiserve\[hf\]"):
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


def test_a_long_text_does_not_hold_other_threads_up() -> None:
    tokenizer = tiny_text.byte_level()
    text = "hello there, my friend. " * 40_000
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(tokenizer.encode, text, add_special_tokens=False)
        num_turns = 0
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns >= 10, f"others had {num_turns} turns while a text of {len(text)} characters was encoded"
    assert tokenizer.decode(encoding.result(), skip_hidden=False) == text
