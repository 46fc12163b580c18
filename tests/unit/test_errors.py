"""The exception tree: what each error carries to the client and to the command line."""

from __future__ import annotations

import inspect

import pytest

from hiserve import errors
from hiserve.errors import HiserveError, InvariantError, to_error

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HiserveError | InvariantError)
]


def test_the_picture_at_the_top_shows_every_class_and_its_status() -> None:
    lines = (errors.__doc__ or "").splitlines()[2:]
    drawn = [next(word for word in line.split() if word.endswith("Error")) for line in lines]
    assert sorted(drawn) == sorted(kind.__name__ for kind in KINDS)
    for name, line in zip(drawn, lines, strict=True):
        if "HTTP" in line:
            assert f"(HTTP {getattr(errors, name).status})" in line


def test_codes_name_their_class_and_survive_the_wire() -> None:
    kinds = [kind for kind in KINDS if issubclass(kind, HiserveError) and kind is not HiserveError]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        found = to_error(kind("a fact.").code, "a fact.")
        assert (type(found), found.message, found.status) == (kind, "a fact.", kind.status)


def test_a_code_of_its_own_stays() -> None:
    error = errors.RequestError("a fact.", code="odd", param="top_p")
    assert (error.code, error.param, str(error)) == ("odd", "top_p", "a fact.")
    assert errors.RequestError("x").code == "invalid_request"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, errors.RequestError)])
def test_faults_of_the_caller_are_4xx(kind: type[HiserveError]) -> None:
    assert 400 <= kind.status < 500


def test_a_broken_invariant_is_nobody_s_request() -> None:
    assert not issubclass(InvariantError, HiserveError)
