"""The executor: what a step tells of its tokens and of the prompt, and settings that look at what came before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve.core.plan import Scores, TableWrites
from hiserve.core.request import SamplingParams
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.sampling import wanted_logits

PAGE, NUM_PAGES, VOCAB = 4, 128, 320
PROMPTS = {1: [7, 3, 300, 3, 8, 41], 2: list(range(40, 73)), 3: [9] * 8, 4: [5]}
Full = Callable[[list[int]], torch.Tensor]
SCORED = msgspec.structs.replace(GREEDY, logprobs=5, prompt_logprobs=3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def full(folder: Path) -> Full:
    """Logits of every position of a sequence, in one float64 forward of that sequence alone."""

    def forward(tokens: list[int]) -> torch.Tensor:
        return engine(folder).logits(HandPlanner(PAGE, NUM_PAGES), {1: tokens}, len(tokens))[1]

    return forward


def engine(folder: Path, dtype: str = "float64", **options: Any) -> Engine:
    return Engine(folder, page_size=PAGE, num_pages=NUM_PAGES, dtype=dtype, **options)


class Told:
    """What was told of each row: tokens, their scores, those of the prompt, as (logprob, top tokens, top logprobs)."""

    def __init__(self, running: Engine, sampling: dict[int, SamplingParams], chunk: int, num_steps: int) -> None:
        planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=2)
        for row, params in sampling.items():
            planner.admit(row, PROMPTS[row], params)
        self.tokens: dict[int, list[int]] = {row: [] for row in sampling}
        self.scores: dict[int, list[Any]] = {row: [] for row in sampling}
        self.prompt: dict[int, list[Any]] = {row: [] for row in sampling}
        self.had_none = self.had_prompt_none = 0
        plans = [
            planner.step({row: min(chunk, planner.known[row] - planner.computed[row]) for row in sampling})
            for _ in range(num_steps)
        ]
        for plan, future in [(plan, running.executor.submit(plan)) for plan in plans]:
            result = future.result()
            sampled = plan.rows[plan.samples].tolist()
            for row, token in zip(sampled, result.tokens[:, 0].tolist(), strict=True):
                self.tokens[row].append(token)
            self._take(self.scores, sampled, result.scores)
            scored = np.repeat(plan.rows, plan.num_scored).tolist()
            self._take(self.prompt, scored, result.prompt_scores)
            self.had_none += result.scores is None
            self.had_prompt_none += result.prompt_scores is None
        running.executor.close()

    def _take(self, into: dict[int, list[Any]], rows: list[int], scores: Scores | None) -> None:
        if scores is None:
            return
        told = zip(scores.logprobs.tolist(), scores.top_tokens.tolist(), scores.top_logprobs.tolist(), strict=True)
        for row, each in zip(rows, told, strict=True):
            into[row].append(each)


def logprobs(full: Full, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token behind the first; and the distributions."""
    every = [*prompt, *tokens]
    rows = full(every[:-1]).log_softmax(-1)
    return rows.gather(1, torch.tensor(every[1:])[:, None])[:, 0], rows


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("chunk", [3, 7, 64])
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-9), ("float32", 1e-4)])
def test_scores_are_those_of_one_full_forward(
    folder: Path, full: Full, dtype: str, atol: float, chunk: int, threaded: bool
) -> None:
    """Ragged chunks of every prompt; float32 rounds what is told of a float64 model once, at the end."""
    told = Told(engine(folder, dtype, threaded=threaded), dict.fromkeys(PROMPTS, SCORED), chunk, 25)
    assert len({token for tokens in told.tokens.values() for token in tokens}) >= 20
    for row, prompt in PROMPTS.items():
        assert len(told.prompt[row]) == len(prompt) - 1
        assert len(told.scores[row]) == len(told.tokens[row])
        wanted, rows = logprobs(full, prompt, told.tokens[row])
        every = [*told.prompt[row], *told.scores[row]]
        for (own, top_tokens, top), expected, distribution in zip(every, wanted, rows, strict=True):
            best = distribution.topk(len(top_tokens))
            for got, exact in zip([own, *top], [expected, *best.values], strict=True):
                assert abs(got - exact) <= atol + np.spacing(np.float32(exact.abs()))
            if dtype == "float64":
                assert top_tokens == best.indices.tolist()
        assert {len(each[1]) for each in told.prompt[row]} <= {3}
        assert {len(each[1]) for each in told.scores[row]} == {5}


def test_scores_are_the_models_own_whatever_chose_the_token(folder: Path, full: Full) -> None:
    asked = msgspec.structs.replace(
        SCORED, temperature=1.5, top_k=40, presence_penalty=1.0, logit_bias={7: 4.0}, min_tokens=9, seed=6
    )
    told = Told(engine(folder), dict.fromkeys(PROMPTS, asked), 64, 20)
    for row, prompt in PROMPTS.items():
        wanted, _ = logprobs(full, prompt, told.tokens[row])
        got = [each[0] for each in told.scores[row]]
        np.testing.assert_allclose(got, wanted[len(prompt) - 1 :], rtol=1e-6)
    assert 7 in {token for tokens in told.tokens.values() for token in tokens}


def test_a_step_tells_the_most_that_any_of_its_rows_wants_and_nothing_unasked(folder: Path) -> None:
    sampling = {
        1: GREEDY,
        2: msgspec.structs.replace(GREEDY, logprobs=4),
        3: msgspec.structs.replace(GREEDY, logprobs=0, prompt_logprobs=2),
    }
    told = Told(engine(folder), sampling, 64, 3)
    assert {len(each[1]) for row in sampling for each in told.scores[row]} == {4}
    assert [len(told.prompt[row]) for row in sampling] == [0, 0, 7]
    assert {len(each[1]) for each in told.prompt[3]} == {2}
    assert (told.had_none, told.had_prompt_none) == (0, 2)
    plain = Told(engine(folder), dict.fromkeys(sampling, GREEDY), 64, 3)
    assert (plain.had_none, plain.had_prompt_none) == (3, 3)
    assert plain.tokens == told.tokens


def test_a_faulted_row_has_scores_of_some_kind_and_the_others_have_theirs(folder: Path) -> None:
    expected = Told(engine(folder), {1: SCORED, 2: SCORED}, 64, 1)
    running, planner = engine(folder), HandPlanner(PAGE, NUM_PAGES)
    for row in (1, 2):
        planner.admit(row, PROMPTS[row], SCORED)
    plan = planner.step({1: 6, 2: 33})
    running.rows.apply(plan)
    running.rows.page_owner[planner.pages[1][0]] = 99
    step_alone = dataclasses.replace(plan, admit=(), table=TableWrites())
    result = running.executor.submit(step_alone).result()
    assert result.faults.tolist() == [1]
    assert result.scores is not None
    assert result.prompt_scores is not None
    assert result.prompt_scores.logprobs.shape == (5 + 32,)
    assert result.scores.logprobs[1] == expected.scores[2][0][0]
    assert result.prompt_scores.logprobs[5:].tolist() == [each[0] for each in expected.prompt[2]]


PENALISED = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.8, seed=1),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.5, seed=1),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=0.7, seed=1),
    "frequency below zero": SamplingParams(temperature=0.0, frequency_penalty=-0.5, seed=1),
    "bias": SamplingParams(temperature=0.0, logit_bias={11: 1.5, 12: 1.4}, frequency_penalty=0.3, seed=1),
    "drawn": SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.6, repetition_penalty=1.2, seed=77),
}


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("name", PENALISED)
def test_a_reply_looks_back_at_its_own_tokens(folder: Path, full: Full, name: str, threaded: bool) -> None:
    """Greedy replies equal a loop in plain Python over a full forward's logits; drawn ones stand on what it keeps."""
    params = PENALISED[name]
    told = Told(engine(folder, threaded=threaded), {1: params, 2: GREEDY, 3: params}, 5, 24)
    alone = Told(engine(folder), {1: params}, 64, 16)
    assert alone.tokens[1] == told.tokens[1][:16]
    for row in (1, 3):
        prompt, tokens = PROMPTS[row], told.tokens[row]
        rows = full([*prompt, *tokens[:-1]])[len(prompt) - 1 :].tolist()
        for index, (logits, token) in enumerate(zip(rows, tokens, strict=True)):
            wanted = np.array(wanted_logits(logits, params, [*prompt, *tokens[:index]], len(prompt)))
            assert token == wanted.argmax() if params.temperature == 0 else np.isfinite(wanted[token])
    plain = Told(engine(folder), {1: GREEDY, 2: GREEDY, 3: GREEDY}, 5, 24)
    assert told.tokens[1] != plain.tokens[1]
    assert told.tokens[2] == plain.tokens[2]


def test_a_resumed_reply_still_knows_where_its_prompt_ended(folder: Path) -> None:
    """As after a preemption: prompt and output come back as one sequence of known tokens."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, min_tokens=12, stop_token_ids=(3, 8), seed=1)
    whole = Told(engine(folder), {1: params}, 64, 20).tokens[1]
    assert not {3, 8} & set(whole[:12])

    def resumed(num_prompt: int) -> list[int]:
        running, planner = engine(folder), HandPlanner(PAGE, NUM_PAGES)
        planner.admit(1, [*PROMPTS[1], *whole[:10]], params, num_prompt=num_prompt)
        plans = [planner.step({1: planner.known[1] - planner.computed[1]}) for _ in range(10)]
        return [int(running.executor.submit(plan).result().tokens[0, 0]) for plan in plans]

    assert resumed(len(PROMPTS[1])) == whole[10:]
    assert resumed(len(PROMPTS[1]) + 10) != whole[10:], "it makes no difference here where the prompt ends"
