"""The arithmetic of speculation: accept length, acceptance, speed-up, cost of a cycle, and where it stops paying."""

from __future__ import annotations

import pytest

from hiserve.bench.equality import Equality
from hiserve.bench.spec_engine import BatchResult, check_source, prepare, run_batch
from hiserve.bench.spec_summary import Case, check_accepted, crossover, cycle_costs, figures_of
from hiserve.core.request import SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.errors import ConfigError, EngineError
from tests.unit.bench.spec_fakes import FakeEngine, batch, costs, counting

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]


def case(plain: list[BatchResult], spec: list[BatchResult], steps: str = "3") -> Case:
    equality = Equality(verdict="same", num_replies=1, num_tokens=9)
    return Case(
        proposer="ngram",
        steps=steps,
        batch=2,
        temperature=0.0,
        source="device",
        plain=plain,
        spec=spec,
        equality=equality,
    )


def params(num_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=num_tokens)] * 2


def test_a_batch_is_timed_behind_its_first_token_and_counts_steps_of_the_slowest_request() -> None:
    engine = FakeEngine(counting, drafts=DraftUse(4, 12, (3, 2, 1)))
    found, replies = run_batch(engine, PROMPTS, params(11))
    assert [len(reply) for reply in replies] == [11, 11]
    assert found.num_decoded == 20  # the first token of each came with its prompt
    assert found.seconds == pytest.approx(1.1)
    assert found.num_steps == 10 - 6
    assert found.drafts == DraftUse(8, 24, (6, 4, 2))
    assert found.tokens_per_s == pytest.approx(20 / 1.1)
    assert found.step_s == pytest.approx(1.1 / 4)


def test_an_engine_without_drafts_takes_a_step_for_every_token() -> None:
    found, _ = run_batch(FakeEngine(counting), PROMPTS, params(11))
    assert (found.num_steps, found.drafts) == (10, DraftUse())


def test_figures_are_medians_of_pairs_of_runs() -> None:
    plain = [batch(seconds=seconds, num_steps=40) for seconds in (4.0, 8.0, 2.0)]
    spec = [batch(seconds=seconds, num_steps=16) for seconds in (2.0, 2.0, 2.0)]
    found = figures_of(case(plain, spec))
    assert found.speedup == 2.0  # of 2, 4 and 1, and not a median over a median of other runs
    assert (found.tokens_per_s, found.plain_tokens_per_s) == (20.0, 10.0)
    assert (found.step_s, found.plain_step_s) == (0.125, 0.1)
    assert found.cycle_cost == pytest.approx(0.125 / 0.1)


def test_accept_length_and_acceptance_are_of_all_verifying_steps() -> None:
    spec = [batch(drafts=DraftUse(10, 30, (8, 6, 4))), batch(drafts=DraftUse(30, 90, (12, 4, 2)))]
    found = figures_of(case([batch()] * 2, spec))
    assert found.accept_length == pytest.approx(1 + 36 / 40)
    assert found.acceptance == pytest.approx([20 / 40, 10 / 40, 6 / 40])


@pytest.mark.parametrize(
    ("speedups", "batch_of_loss"),
    [
        ({1: 1.5, 4: 1.2, 16: 0.9, 64: 0.5}, 16),
        ({1: 1.5, 4: 1.0}, None),
        ({1: 0.9, 4: 0.8}, 1),
        ({64: 0.7, 4: 0.9, 16: 1.1}, 64),  # what loses and gains again has not crossed over
    ],
)
def test_speculation_stops_paying_at_the_batch_from_which_all_larger_ones_lose(
    speedups: dict[int, float], batch_of_loss: int | None
) -> None:
    assert crossover(speedups) == batch_of_loss


def test_drafts_of_which_none_was_accepted_are_an_error_with_a_remedy() -> None:
    none = [case([batch()], [batch(drafts=DraftUse(10, 30, (0, 0, 0)))])]
    with pytest.raises(EngineError, match=r"30 verified, and none was accepted.*--output-length"):
        check_accepted(none)
    with pytest.raises(EngineError, match="0 verified"):
        check_accepted([case([batch()], [batch(drafts=DraftUse())])])
    check_accepted([*none, case([batch()], [batch(drafts=DraftUse(1, 3, (1, 0, 0)))])])
    for steps in ("0", "auto"):
        check_accepted([case([batch()], [batch(drafts=DraftUse())], steps)])


def test_the_cost_of_a_cycle_is_what_verifies_extends_and_drafts_over_a_plain_step() -> None:
    found = {(each.batch, each.steps): each for each in cycle_costs(costs())}
    assert len(found) == 6
    of_it = found[4, 3]
    assert (of_it.plain_s, of_it.verify_s, of_it.extend_s, of_it.draft_s) == (4.0, 7.0, 1.2, 1.0)
    assert of_it.cost == pytest.approx(9.2 / 4)
    assert found[1, 1].draft_s == 0.0  # the first draft comes of the forward behind the step


@pytest.mark.parametrize(
    ("source", "asked", "tiers"),
    [
        ("cold", ["flush device host"], (0, 0)),
        ("device", ["flush device host", "2 prompts, 1 tokens at 0"], (8, 0)),
        ("host", ["flush device host", "2 prompts, 1 tokens at 0", "flush device"], (0, 8)),
    ],
)
def test_prompts_are_where_the_source_says(source: str, asked: list[str], tiers: tuple[int, int]) -> None:
    engine = FakeEngine(counting)
    engine.generate(PROMPTS, params(3))
    engine.log.clear()
    prepare(engine, PROMPTS, source)
    assert engine.log == asked
    found, _ = run_batch(engine, PROMPTS, params(3))
    assert (found.cached_tokens["device"], found.cached_tokens["host"]) == tiers
    check_source([found], source)
    others = {"cold", "device", "host"} - {source}
    for other in others:
        with pytest.raises(ConfigError, match=f"leave {other} out of --sources"):
            check_source([found], other)
