"""On a GPU nothing keeps a step from being replayed, waits for the device or allocates once all is warm."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.config import make_config
from hiserve.core.machine import probe
from hiserve.core.resolve import resolve
from hiserve.models.shapes import read_model
from hiserve.worker.readiness import GRAPHS, check_graphs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("model", [{}, {"shape": "qwen3-0.6b", "load_format": "dummy"}], ids=["nano", "qwen3-0.6b"])
def test_steps_of_every_kind_are_ready(model: dict[str, Any], backend: str) -> None:
    given = make_config(device="cuda", dtype="bfloat16", attention_backend=backend, **model)
    report = check_graphs(resolve(given, read_model(given.model)[1].facts(), probe()).config)
    for check in report.checks:
        print(check)
    assert [check.problems for check in report.checks] == [[]] * 2 * len(GRAPHS)
