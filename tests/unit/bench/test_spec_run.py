"""The sweep: which engines are made, in which order batches are run, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hiserve.bench.equality import Equality
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import BatchResult, check_source, prepare, read_prompts, read_texts, run_batch
from hiserve.bench.spec_run import (
    Case,
    Found,
    check_accepted,
    conditions,
    crossover,
    cycle_costs,
    figures_of,
    sweep_engines,
)
from hiserve.config.options import make_options
from hiserve.core.request import SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.errors import ConfigError, EngineError
from hiserve.models.model_config import NANO, find_model
from tests.unit.bench.spec_fakes import FakeEngine, Opener, batch, costs, counting

SMALL: dict[str, Any] = {"batches": (1, 2), "sources": ("cold", "device"), "output_length": 9, "repeats": 2}


def make(settings: dict[str, Any]) -> FakeEngine:
    is_fixed = settings["spec_steps"] == 3 or settings.get("spec_tree", "off") != "off"
    drafts = DraftUse(2, 6, (2, 2, 2)) if is_fixed else DraftUse()
    engine = FakeEngine(counting, drafts=None if settings["spec"] == "off" else drafts, spec=settings["spec"])
    engine.draft_costs = costs() if settings["spec_steps"] == "auto" and settings["spec"] != "off" else None
    return engine


def run(opener: Opener, sweep: SweepOptions, **settings: Any) -> Found:
    return sweep_engines(make_options(**settings), sweep, opener, lambda _: lambda _: None)


def test_every_case_is_measured_with_one_plain_engine_and_one_that_speculates() -> None:
    opener = Opener(make)
    found = run(opener, SweepOptions(proposers=("ngram", "mtp:x"), steps=("0", "3", "auto"), **SMALL))
    assert [(each["spec"], each["spec_steps"]) for each in opener.settings] == [
        ("off", "auto"),
        *((proposer, steps) for proposer in ("ngram", "mtp:x") for steps in (0, 3, "auto")),
    ]
    assert opener.most_open == 2
    cases = [(case.proposer, case.steps, case.batch, case.source) for case in found.cases]
    assert len(cases) == len(set(cases)) == 2 * 3 * 2 * 2
    assert all(len(case.plain) == len(case.spec) == 2 for case in found.cases)
    assert list(found.costs) == ["ngram", "mtp:x"]
    assert [(cost.batch, cost.steps) for cost in found.costs["ngram"]] == [(b, k) for b in (1, 4) for k in (0, 1, 3)]


def test_a_tree_is_measured_beside_numbers_of_drafts() -> None:
    opener = Opener(make)
    found = run(opener, SweepOptions(proposers=("ngram",), steps=("3", "3x6:16", "trees"), **SMALL))
    given = [(each["spec_steps"], each["spec_tree"]) for each in opener.settings]
    assert given == [("auto", "off"), (3, "off"), ("auto", "3x6:16"), ("auto", "auto")]
    assert {case.steps for case in found.cases} == {"3", "3x6:16", "trees"}


def test_plain_and_speculative_runs_take_turns() -> None:
    log: list[str] = []

    def logged(settings: dict[str, Any]) -> FakeEngine:
        engine = make(settings)
        generate = engine.generate

        def told(prompts: Any, sampling: Any = None) -> Any:
            log.append(settings["spec"])
            return generate(prompts, sampling)

        engine.generate = told  # type: ignore[method-assign]
        return engine

    sweep = SweepOptions(
        proposers=("ngram",), steps=("3",), batches=(2,), sources=("cold",), output_length=9, repeats=3
    )
    run(Opener(logged), sweep)
    assert log == ["off", "ngram"] * 4  # the first of each does not count


def test_engines_are_as_large_as_the_sweep_needs_unless_the_user_says() -> None:
    opener = Opener(make)
    sweep = SweepOptions(proposers=("ngram",), steps=("3",), **SMALL, prompt_length=100)
    run(opener, sweep, page_size=16)
    asked = opener.settings[0]
    assert asked["max_running_requests"] == 2
    assert 100 + 9 + 2 * 15 < asked["max_model_len"] < 160
    assert asked["kv_pages"] * 16 >= 2 * asked["max_model_len"]
    run(opener, sweep, kv_pages=77, max_model_len=500, max_running_requests=9)
    told = opener.settings[-1]
    assert (told["kv_pages"], told["max_model_len"], told["max_running_requests"]) == (77, 500, 9)


def test_a_changed_token_is_found_whichever_run_it_was_in() -> None:
    calls = iter(range(99))

    def wrong_once(settings: dict[str, Any]) -> FakeEngine:
        engine = make(settings)
        if settings["spec"] != "off":
            engine._reply = lambda prompt: [5] * 9 if next(calls) == 2 else counting(prompt)
        return engine

    sweep = SweepOptions(
        proposers=("ngram",), steps=("3",), batches=(1,), sources=("cold",), output_length=9, repeats=3
    )
    (case,) = run(Opener(wrong_once), sweep).cases
    assert (case.equality.verdict, case.equality.num_differing) == ("different", 1)


def test_a_proposer_of_which_nothing_is_accepted_ends_the_sweep() -> None:
    def useless(settings: dict[str, Any]) -> FakeEngine:
        return FakeEngine(counting, drafts=DraftUse(8, 24, (0, 0, 0)), spec=settings["spec"])

    with pytest.raises(EngineError, match="ngram with 3 drafts had 96 verified, and none was accepted"):
        run(Opener(useless), SweepOptions(proposers=("ngram",), steps=("3",), **(SMALL | {"batches": (1,)})))


@pytest.mark.parametrize(
    ("fields", "settings", "words"),
    [
        ({"steps": ("some",)}, {}, "--steps has 'some'. Use auto, trees, numbers from 0 to 15, or a shape"),
        ({"steps": ("16",)}, {}, "--steps has '16'"),
        ({"steps": ("3x6:99",)}, {}, "a tree has 2 to 63 nodes"),
        ({}, {"spec_steps": 3}, "use --steps"),
        ({}, {"spec_tree": "3x6:16"}, "use --steps"),
        ({"proposers": ("ngram",)}, {"spec": "ngram"}, "--spec and --proposers"),
        ({}, {"disable_prefix_cache": True}, "need the prefix cache"),
        ({"batches": (4096,)}, {}, "gives 128 prompts"),
        ({"dataset": "chats"}, {}, "needs --path"),
        ({}, {}, "no draft head came with the model"),
    ],
)
def test_what_cannot_be_swept_is_refused(fields: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    def none(given: dict[str, Any]) -> FakeEngine:
        return make(given | {"spec": "off"})

    with pytest.raises(ConfigError, match=words):
        run(Opener(none), SweepOptions(**fields), **settings)


def test_prompts_that_come_along_are_distinct_conversations_which_end_with_the_user() -> None:
    prompts = read_texts(SweepOptions(batches=(128,)))
    assert all(isinstance(prompt, list) and prompt[-1]["role"] == "user" for prompt in prompts)
    assert len({json.dumps(prompt) for prompt in prompts}) == 128


def test_recorded_prompts_end_with_a_question_or_are_the_longest_of_their_session(tmp_path: Path) -> None:
    chats, sessions = tmp_path / "chats.jsonl", tmp_path / "sessions.jsonl"
    said = [{"role": role, "content": role[0] * 3} for role in ("user", "assistant", "user", "assistant")]
    chats.write_text(json.dumps({"messages": said}) + "\n")
    (prompt,) = read_texts(SweepOptions(dataset="chats", path=chats, batches=(1,)))
    assert prompt == said[:3]
    rows = [("a", "one"), ("b", "two two"), ("a", "one and more")]
    lines = (
        json.dumps({"session_id": session, "timestamp_us": at, "input": text, "output": ""})
        for at, (session, text) in enumerate(rows)
    )
    sessions.write_text("\n".join(lines))
    prompts = read_texts(SweepOptions(dataset="agent-sessions", path=sessions, batches=(2,)))
    assert sorted(map(str, prompts)) == ["one and more", "two two"]


def test_prompts_are_rendered_and_lose_their_beginnings_where_they_are_too_long() -> None:
    config = make_options()
    whole, cut = (read_prompts(config, SweepOptions(batches=(8,), prompt_length=length)) for length in (4096, 30))
    assert all(prompt[-30:] == short for prompt, short in zip(whole, cut, strict=True))
    assert max(len(prompt) for prompt in cut) == 30 < max(len(prompt) for prompt in whole)
    tokenizer = Tokenizer.from_file(str(find_model(NANO) / "tokenizer.json"))
    said = tokenizer.decode(whole[0], skip_special_tokens=False)
    assert said.startswith("<|bos|><|user|>") and said.endswith("<|end|><|assistant|>")


def test_ctrl_c_keeps_the_cases_that_were_measured() -> None:
    told: list[str] = []

    def stop_after_three(words: str) -> None:
        told.append(words)
        if len(told) == 3:
            raise KeyboardInterrupt

    sweep = SweepOptions(proposers=("ngram",), steps=("0", "3"), **SMALL)
    found = sweep_engines(make_options(), sweep, Opener(make), lambda _: stop_after_three)
    assert found.is_partial and len(found.cases) == 3
    assert told[0].startswith("ngram 0: ") and told[0].endswith(" x")
    with pytest.raises(KeyboardInterrupt):
        sweep_engines(make_options(), sweep, Opener(interrupting), lambda _: lambda _: None)
    assert not run(Opener(make), sweep).is_partial


def interrupting(_: dict[str, Any]) -> FakeEngine:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    return FakeEngine(interrupt)


def test_the_default_sweep_is_small() -> None:
    sweep = SweepOptions()
    assert len(list(conditions(sweep))) * len(sweep.steps) <= 12, "a minute on a CPU"
    assert {"0", "auto"} < set(sweep.steps) and {"cold", "host"} == set(sweep.sources)


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
