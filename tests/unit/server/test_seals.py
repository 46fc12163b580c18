"""Seals: every text comes back, and nothing that the secret has not sealed."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiserve.server.reply.seals import Seals

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
SEALS = Seals("a secret")


@given(TEXTS)
def test_a_sealed_text_is_opened_by_every_server_with_the_secret(text: str) -> None:
    sealed = SEALS.seal(text)
    assert sealed.isascii() and "\n" not in sealed
    assert Seals("a secret").open(sealed) == text


@given(TEXTS)
def test_another_secret_opens_nothing(text: str) -> None:
    assert Seals("a secret ").open(SEALS.seal(text)) is None
    assert Seals().open(SEALS.seal(text)) is None
    assert Seals().open(Seals().seal(text)) is None, "two secrets were drawn"


@given(TEXTS, st.data())
def test_a_changed_seal_is_none(text: str, data: st.DataObject) -> None:
    raw = bytearray(urlsafe_b64decode(SEALS.seal(text)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert SEALS.open(urlsafe_b64encode(raw).decode()) is None


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: urlsafe_b64encode(raw).decode()))
def test_what_is_no_seal_is_none(text: str) -> None:
    assert SEALS.open(text) is None


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 43, 44])
def test_a_cut_seal_is_none(cut: int) -> None:
    assert SEALS.open(SEALS.seal("a thought")[:cut]) is None
