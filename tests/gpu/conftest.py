"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.models.model_config import NANO, find_model
from tests.helpers.cuda import graph_engine
from tests.helpers.models import Engine


@pytest.fixture(scope="session")
def nano() -> Path:
    return find_model(NANO)


@pytest.fixture(scope="module")
def eager(nano: Path) -> Iterator[Engine]:
    """Of hiserve-nano, without graphs."""
    subject = graph_engine(nano, "off")
    yield subject
    subject.executor.close()


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps that are planned ahead."""
    found: int = request.param
    return found
