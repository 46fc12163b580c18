"""Sampling defaults of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiserve.core.request import SamplingParams
from hiserve.errors import ModelError, RequestError
from hiserve.models.generation_config import SamplingDefaults
from hiserve.models.model_config import NANO, find_model, read_model_config
from tests.helpers.checkpoint_folder import folder


def read(place: Path, **generation: Any) -> SamplingDefaults:
    return read_model_config(folder(place, generation=generation)).sampling_defaults


def test_a_model_that_is_silent_has_no_defaults(tmp_path: Path) -> None:
    assert read_model_config(folder(tmp_path)).sampling_defaults == SamplingDefaults()
    assert read(tmp_path, max_length=20, do_sample=True, temperature=None) == SamplingDefaults()


def test_every_default_is_read(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    assert read(tmp_path, do_sample=True, **given) == SamplingDefaults(**given)
    for name, value in given.items():
        assert read(tmp_path, **{name: value}) == SamplingDefaults(**{name: value})


def test_the_embedded_model_has_defaults() -> None:
    assert read_model_config(find_model(NANO)).sampling_defaults == SamplingDefaults(temperature=0.6, top_p=0.9)


def test_do_sample_false_is_greedy_only_where_nothing_else_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False) == SamplingDefaults(temperature=0.0)
    assert read(tmp_path, do_sample=False, repetition_penalty=1.1).temperature == 0.0
    for name, value in (("temperature", 0.7), ("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)):
        assert read(tmp_path, do_sample=False, **{name: value}) == SamplingDefaults(**{name: value})
    assert read(tmp_path, do_sample=None) == SamplingDefaults()


VALUES = {
    "temperature": (-0.1, 0, 0.0, 100, 100.5, float("nan"), float("inf"), "0.7", True),
    "top_p": (0, 0.0, 1e-9, 1, 1.1, float("nan"), [0.9]),
    "top_k": (-2, -1, 0, 1, 2**31 - 1, 2**31, 1.5, "5"),
    "min_p": (-0.1, 0, 1, 1.01),
    "repetition_penalty": (0, 0.01, 100, 101, {}),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES.items() for value in values])
def test_a_default_is_read_exactly_if_a_request_may_ask_for_it(tmp_path: Path, name: str, value: Any) -> None:
    try:
        is_legal = type(value) in (int, float) and (name != "top_k" or isinstance(value, int))
        SamplingParams(**{name: value if is_legal else -99})
    except RequestError:
        with pytest.raises(ModelError, match=rf"generation_config\.json .*{name}"):
            read(tmp_path, **{name: value})
    else:
        assert getattr(read(tmp_path, **{name: value}), name) == value
