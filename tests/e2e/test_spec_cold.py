"""A head that is cold computes nothing, and no token is another for it; pages know what it left out, on every tier."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.usage import DraftUse
from hiserve.spec.adaptive import DraftController
from tests.helpers.cache_paths import HOST, SMALL_MODEL, answer, check, pool
from tests.helpers.cold_heads import Scripted, counted, forwards_in_the_cold, proposer_of, script, shown_to
from tests.helpers.dialogues import conversations, trained
from tests.helpers.drafted import save_heads
from tests.helpers.small_model import small_model
from tests.helpers.step_costs import step_costs
from tests.helpers.tiered import check_whole, counts_of, engine_of, leave_device, rest
from tests.helpers.widening import some

STEPS, NUM_NEW = 3, 40
SAMPLING = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 1.0))
]


def settings(spec: str, page_size: int = 16, **others: Any) -> dict[str, Any]:
    base = SMALL_MODEL | pool(page_size) | {"host_cache_gib": 0, "spec": spec, "spec_steps": STEPS}
    return base | others


def prompts_of(llm: LLM, num: int) -> list[list[int]]:
    return conversations(llm)[::7][:num]


@pytest.fixture(scope="module")
def work() -> Any:
    with LLM(**settings("off", spec_steps=0)) as llm:
        prompts = prompts_of(llm, len(SAMPLING))
    return answer(prompts, SAMPLING, model=small_model())


@pytest.mark.parametrize(
    ("kind", "page_size", "depth"),
    [
        ("eagle3", 4, 1),
        pytest.param("draft_model", 16, 0, marks=pytest.mark.wide),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product(("eagle3", "mtp", "draft_model"), (1, 4, 16), (0, 1))
        ],
    ],
)
def test_tokens_are_the_same_however_often_the_head_goes_cold(work: Any, kind: str, page_size: int, depth: int) -> None:
    with LLM(**settings(trained(kind, small_model()), page_size, overlap=depth) | HOST) as llm:
        for period in (3, 7, 23):
            script(llm, Scripted(STEPS, lambda step, period=period: step // period % 2 == 1))
            for result, expected in zip(llm.generate(work.prompts, work.sampling), work.expected, strict=True):
                check(result.outputs[0], expected)
            leave_device(llm)
        assert counts_of(llm).loads.num_fulfilled > 0
        check_whole(llm)


@pytest.mark.parametrize("kind", some(["eagle3", "mtp", "draft_model"], "mtp"))
def test_a_cold_head_computes_nothing_and_drafts_as_well_once_it_is_warm(work: Any, kind: str) -> None:
    """Behind what it left out: with less to attend over it is right less often, and right all the same."""
    lengths = {}
    for begins_warm in (True, False):
        with LLM(**settings(trained(kind, small_model()), 4, overlap=0)) as llm:
            head = counted(llm)
            script(llm, Scripted(STEPS, lambda step, begins_warm=begins_warm: not begins_warm and step < 12))
            while_cold, shown = forwards_in_the_cold(llm, head), shown_to(llm)
            results = llm.generate(work.prompts, work.sampling)
            reads = kind != "draft_model"
            assert shown == {(False, reads)} | (set() if begins_warm else {(True, False)})
        for result, expected in zip(results, work.expected, strict=True):
            check(result.outputs[0], expected)
        use = sum((result.outputs[0].drafts or DraftUse() for result in results), DraftUse())
        lengths[begins_warm] = use.accept_length
        assert head.num_forwards > 0
        assert (len(while_cold) >= 10) != begins_warm
        assert not any(while_cold), while_cold
    print(lengths)
    assert lengths[False] > 1 + 0.6 * (lengths[True] - 1)


class Untimed(DraftController):
    """Goes by the table, and by what is accepted, alone."""

    def record(self, num_draft: Any, counts: Any, num_made: int, mean_context: float, seconds: float | None) -> None:
        super().record(num_draft, counts, num_made, mean_context, None)


def table() -> StepCosts:
    rows, tiers = np.array([1, 4]), np.arange(STEPS + 1)
    verify = np.broadcast_to(1.0 + 0.1 * tiers, (2, STEPS + 1)).copy()
    follow = np.broadcast_to(np.where(tiers, 0.3, 0.2), (2, STEPS + 1)).copy()
    return step_costs(rows, tiers, verify, follow, np.full(2, 0.2))


@pytest.mark.wide
def test_a_head_that_is_never_right_computes_hardly_anything(tmp_path: Path) -> None:
    spec = f"eagle3:{save_heads(tmp_path, 19)['eagle3']}"
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=400, ignore_eos=True)
    with LLM(**settings(spec, max_model_len=512, max_running_requests=1, dtype="float32")) as llm:
        script(llm, Untimed(table(), 8))
        head, prompts = counted(llm), prompts_of(llm, 2)
        llm.generate(prompts[:1], sampling)  # finds out
        learnt = head.num_forwards
        results = llm.generate(prompts[1:], sampling)
        drafts = results[0].outputs[0].drafts
        chosen = engine_of(llm).stats().drafts.chosen_steps
    assert learnt > 50
    assert head.num_forwards - learnt < 100, "of 400 steps, with two calls a step that it takes part in"
    assert drafts is None or drafts.verify_steps < 30
    print(chosen)


def drafted_pages(llm: LLM, num_pages: int) -> list[bool]:
    """Whether each of a row's first pages, of the row in use, is drafted."""
    rows = engine_of(llm)._executor._rows  # type: ignore[attr-defined]
    marks = rows.is_drafted
    assert marks is not None
    (row,) = engine_of(llm)._planner._rows.active.tolist()
    return [bool(marks[page] == 1) for page in rows.page_table[row, :num_pages].tolist()]


@pytest.mark.parametrize("tier", some(["device", "host", "store"], "store"))
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_pages_that_were_published_in_the_cold_are_known_as_such_wherever_they_come_from(
    tmp_path: Path, tier: str, kind: str
) -> None:
    """And those before them as drafted: another engine, with the same host or store, knows it too."""
    page_size, warm_pages, cold_pages = 4, 4, 5
    options = settings(trained(kind, small_model()), page_size, max_running_requests=1, max_batched_tokens=16, **HOST)
    options["kv_canary"] = False
    if tier == "store":
        options |= {"store": f"file:{tmp_path}", "store_prefetch": "wait"}
    one = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
    with LLM(**options) as llm:
        prompt = [token for text in conversations(llm)[:4] for token in text][
            : (warm_pages + cold_pages) * page_size + 1
        ]
        for is_cold, length in ((False, warm_pages), (True, warm_pages + cold_pages)):
            script(llm, Scripted(STEPS, lambda _, is_cold=is_cold: is_cold))
            llm.generate([prompt[: length * page_size + 1]], one)
        rest(llm)
        if tier == "host":
            leave_device(llm)
        elif tier == "store":
            engine_of(llm).flush()
        script(llm, Scripted(STEPS, lambda _: False))
        seen: list[Any] = []
        proposer = proposer_of(llm)
        prepare = proposer.prepare

        def watch(step: Any) -> Any:
            chain = prepare(step)
            row = int(step.rows[0])
            seen.append((drafted_pages(llm, warm_pages + cold_pages), int(proposer._progress.start_page[row])))
            return chain

        proposer.prepare = watch  # type: ignore[method-assign]
        (result,) = llm.generate([[*prompt, *prompt[:7]]], one)
        assert getattr(result.cached, tier) == (warm_pages + cold_pages) * page_size
    assert seen == [([True] * warm_pages + [False] * cold_pages, warm_pages + cold_pages)]
