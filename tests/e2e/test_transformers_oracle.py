"""The executing half against transformers: logits in float32, tokens in float64, plans written by hand.

Two models made by transformers with random weights, and the embedded one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiserve.core.request import SamplingParams
from tests.helpers.models import Engine, load_transformers
from tests.helpers.oracle import MODELS, NUM_NEW, SAMPLED, Subject, make_subject
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.widening import in_turn, some

MIN_DISTINCT = 20
MAX_LOGIT_DIFFERENCE = 1e-4
NUM_PAGES = 160
# The embedded model is larger, and has no layer that both others lack.
SMALL = pytest.mark.parametrize("subject", some(MODELS, "llama", "qwen3"), indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def test_the_reference_outputs_are_varied_enough_to_mean_something(subject: Subject) -> None:
    for outputs in (subject.greedy, subject.sampled):
        assert len({token for tokens in outputs.values() for token in tokens}) >= MIN_DISTINCT
    assert subject.greedy != subject.sampled


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_float32_logits_of_every_position_agree(subject: Subject, attention: str) -> None:
    """Ragged chunks of all prompts at once, in scattered pages."""
    engine = Engine(subject.folder, attention=attention, num_pages=NUM_PAGES)
    logits = engine.logits(HandPlanner(16, NUM_PAGES, shuffle_seed=5), subject.prompts, chunk=9)
    assert max(len(prompt) for prompt in subject.prompts.values()) > 2 * 9
    oracle = load_transformers(subject.folder, torch.float32)
    for row, prompt in subject.prompts.items():
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0]
        assert logits[row].shape == expected.shape
        assert (logits[row] - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE


def generate(
    engine: Engine,
    planner: HandPlanner,
    subject: Subject,
    chunk: int,
    depth: int,
    sampling: SamplingParams = GREEDY,
) -> dict[int, list[int]]:
    """Admits row after row, one a step, and runs all to the end; submits ``depth`` steps ahead of the results."""
    waiting = list(subject.prompts.items())
    out: dict[int, list[int]] = {row: [] for row in subject.prompts}
    emitted = dict.fromkeys(subject.prompts, 0)
    flying: list[Any] = []
    while True:
        if waiting:
            planner.admit(*waiting.pop(0), sampling)
        work = {
            row: min(chunk, planner.known[row] - planner.computed[row])
            for row in planner.known
            if emitted[row] < NUM_NEW
        }
        if work:
            plan = planner.step(work)
            flying.append((plan, engine.executor.submit(plan)))
            for row in plan.rows[plan.samples].tolist():
                emitted[row] += 1
        while flying and (len(flying) > depth or not work):
            plan, future = flying.pop(0)
            result = future.result()
            assert result.faults.size == 0
            for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
                out[row].append(token)
        if not work and not waiting:
            return out


@pytest.mark.parametrize(
    ("chunk", "way"), in_turn([1, 7, 16, 64], [("cpu", 4, 7), ("reference", 16, 7), ("cpu", 16, None)])
)
def test_float64_greedy_tokens_are_equal_in_ragged_batches_of_any_chunk(
    subject: Subject, chunk: int, way: tuple[str, int, int | None]
) -> None:
    attention, page_size, shuffle_seed = way
    engine = Engine(subject.folder, dtype="float64", attention=attention, page_size=page_size, num_pages=NUM_PAGES)
    planner = HandPlanner(page_size, NUM_PAGES, shuffle_seed)
    assert generate(engine, planner, subject, chunk, depth=0) == subject.greedy


@SMALL
@pytest.mark.parametrize("depth", [1, 2])
def test_float64_greedy_tokens_are_equal_when_steps_are_submitted_ahead(subject: Subject, depth: int) -> None:
    engine = Engine(subject.folder, dtype="float64", num_pages=NUM_PAGES, threaded=True)
    assert generate(engine, HandPlanner(16, NUM_PAGES), subject, 16, depth) == subject.greedy
    engine.executor.close()


@SMALL
@pytest.mark.parametrize(("chunk", "depth"), [(1, 0), (7, 1), (64, 2)])
def test_float64_sampled_tokens_are_those_drawn_from_transformers_logits(
    subject: Subject, chunk: int, depth: int
) -> None:
    engine = Engine(subject.folder, dtype="float64", num_pages=NUM_PAGES, threaded=depth > 0)
    planner = HandPlanner(16, NUM_PAGES, shuffle_seed=2)
    assert generate(engine, planner, subject, chunk, depth, SAMPLED) == subject.sampled
    engine.executor.close()


@SMALL
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_float64_tokens_are_equal_over_a_prefix_that_another_request_computed(subject: Subject, attention: str) -> None:
    """Row 4 ends; row 5 asks the same over its whole pages, while row 3 runs on."""
    engine = Engine(subject.folder, dtype="float64", attention=attention, page_size=4, num_pages=NUM_PAGES)
    planner = HandPlanner(4, NUM_PAGES, shuffle_seed=1)
    prompt = subject.prompts[4]
    planner.admit(3, subject.prompts[3])
    planner.admit(4, prompt)
    first = engine.executor.submit(planner.step({3: 5, 4: len(prompt)})).result()
    assert first.tokens[0, 0] == subject.greedy[4][0]
    cached = planner.release(4, keep=(len(prompt) - 1) // 4)
    planner.admit(5, prompt, cached=cached)
    assert planner.computed[5] >= 8
    out: dict[int, list[int]] = {3: [], 5: []}
    while len(out[3]) < NUM_NEW:
        plan = planner.step({row: min(6, planner.known[row] - planner.computed[row]) for row in out})
        result = engine.executor.submit(plan).result()
        assert result.faults.size == 0
        for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
            out[row].append(token)
    assert out[3] == subject.greedy[3]
    assert out[5][:NUM_NEW] == subject.greedy[4]


@SMALL
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_float64_tokens_are_equal_after_a_row_was_preempted(subject: Subject, sampling: SamplingParams) -> None:
    """Half-way, row 2 loses its row and its pages; it comes back elsewhere with what it had generated."""
    expected = subject.greedy if sampling is GREEDY else subject.sampled
    engine = Engine(subject.folder, dtype="float64", page_size=4, num_pages=NUM_PAGES)
    planner = HandPlanner(4, NUM_PAGES)
    planner.admit(1, subject.prompts[1], sampling)
    planner.admit(2, subject.prompts[2], sampling)
    out: dict[int, list[int]] = {1: [], 2: []}
    place = {1: 1, 2: 2}
    while len(out[2]) < NUM_NEW:
        if len(out[2]) == NUM_NEW // 2 and place[2] == 2:
            planner.release(2)
            place[2] = 6
            planner.admit(6, subject.prompts[2] + out[2], sampling)
        plan = planner.step({row: min(9, planner.known[row] - planner.computed[row]) for row in place.values()})
        result = engine.executor.submit(plan).result()
        for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
            out[1 if row == 1 else 2].append(token)
    assert place[2] == 6
    assert out[2] == expected[2]
    assert out[1][:NUM_NEW] == expected[1]
