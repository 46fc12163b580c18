"""On a GPU nothing keeps a step from being replayed, waits for the device or allocates once all is warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiserve.config.options import make_options
from hiserve.core.machine import probe
from hiserve.core.resolve import resolve
from hiserve.engine.graph_check import GRAPHS, check_graphs
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.models.model_config import NANO
from tests.helpers.drafted import save_heads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("model", [{}, {"shape": "qwen3-0.6b", "load_format": "dummy"}], ids=["nano", "qwen3-0.6b"])
def test_steps_of_every_kind_are_ready(model: dict[str, Any], backend: str) -> None:
    check(attention_backend=backend, spec="off", **model)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3", "mtp"])
def test_steps_are_ready_with_what_drafts_behind_them(tmp_path: Path, kind: str) -> None:
    specs = {"ngram": "ngram", "draft_model": f"draft:{NANO}"}
    heads = {} if kind in specs else save_heads(tmp_path, seed=3)
    check(attention_backend="triton", spec=specs.get(kind) or f"{kind}:{heads[kind]}")


def check(**settings: Any) -> None:
    given = make_options(device="cuda", dtype="bfloat16", **settings)
    report = check_graphs(resolve(given, model_facts(given, *read_model(given.model)), probe()).settings)
    for each in report.checks:
        print(each)
    assert [each.problems for each in report.checks] == [[]] * 2 * len(GRAPHS)
