"""Steps with drafts emit what steps without them would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hiserve.core.request import SamplingParams
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.scripted import decode, verify

SAMPLED = SamplingParams(temperature=1.2, seed=3)
FILTERED = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, seed=4, logit_bias={5: 2.0})
PENALISED = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


def prompts() -> dict[int, list[int]]:
    generator = np.random.default_rng(11)
    return {row: generator.integers(3, 300, length).tolist() for row, length in ((1, 15), (2, 16), (3, 31))}


def engine(folder: Path) -> Engine:
    return Engine(folder, dtype="float64", num_pages=40)


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, FILTERED, PENALISED], ids=["greedy", "free", "filtered", "penalised"]
)
def test_tokens_are_those_of_plain_decoding(folder: Path, width: int, sampling: SamplingParams) -> None:
    expected = decode(engine(folder), prompts(), 30, sampling)
    assert verify(engine(folder), prompts(), expected, width, sampling) == expected


def test_rows_with_fewer_drafts_share_a_step_with_rows_that_have_more(folder: Path) -> None:
    expected = decode(engine(folder), prompts(), 4)
    subject = engine(folder)
    planner = HandPlanner(16, 40)
    for row, prompt in prompts().items():
        planner.admit(row, prompt)
    subject.executor.submit(planner.step({row: len(prompt) for row, prompt in prompts().items()})).result()
    num_draft = {1: 0, 2: 3, 3: 1}
    for row, prompt in prompts().items():
        drafts = torch.tensor(expected[row][1 : 1 + num_draft[row]], dtype=torch.int32)
        subject.rows.tokens[row, len(prompt) + 1 : len(prompt) + 1 + num_draft[row]] = drafts
    result = subject.executor.submit(planner.draft_step(num_draft)).result()
    assert result.counts.tolist() == [1, 4, 2]
    assert result.tokens[0, :1].tolist() == expected[1][1:2]
    assert result.tokens[1].tolist() == [*expected[2][1:4], result.tokens[1, 3]]
    assert result.tokens[2, :2].tolist() == expected[3][1:3]
