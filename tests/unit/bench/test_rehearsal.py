"""Rehearsed drafts by concurrency and acceptance: which runs are made, what is told of them, what ends early."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hiserve.bench.options import RehearsalOptions, SweepOptions
from hiserve.bench.plot import Plotter
from hiserve.bench.rehearsal import Rehearsed, RehearsedCase, draw_rehearsed, fitted, rehearse_engines, show_rehearsed
from hiserve.config.options import make_options
from hiserve.core.usage import DraftUse
from hiserve.errors import ConfigError
from tests.unit.bench.spec_fakes import FakeEngine, Opener, batch, counting

SWEEP = SweepOptions(proposers=("mtp",), prompt_length=4, output_length=9, repeats=2)
REHEARSAL = RehearsalOptions(sweep=True, acceptances=(0.0, 0.7), concurrency=(1, 3))


class FakeRehearsed(FakeEngine):
    """Keeps what it was to rehearse."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rehearsed: list[tuple[dict[int, list[int]], float]] = []

    def rehearse(self, texts: Mapping[int, Sequence[int]], acceptance: float) -> None:
        self.rehearsed.append(({seed: list(tokens) for seed, tokens in texts.items()}, acceptance))
        self.log.append(f"rehearse {acceptance:g}")


def backwards(prompt: list[int]) -> list[int]:
    """Goes on otherwise than ``counting``, as rounding might."""
    return [*range(prompt[-1] + 1, prompt[-1] + 5), *[0] * 20]


def run(make: Any = counting, sweep: SweepOptions = SWEEP, advance: Any = None) -> tuple[Rehearsed, list[Any], Opener]:
    engines: list[Any] = []

    def rehearsed(settings: dict[str, Any]) -> Any:
        use = DraftUse(4, 12, (4, 3, 1))
        engines.append(FakeRehearsed(make, drafts=use, spec=settings["spec"]))
        return engines[-1]

    plain, opener = Opener(lambda _: FakeEngine(counting)), Opener(rehearsed)
    found = rehearse_engines(make_options(), sweep, REHEARSAL, plain, opener, lambda _: advance or (lambda _: None))
    return found, engines, opener


def case(**given: Any) -> RehearsedCase:
    usual: dict[str, Any] = {
        "steps": "auto",
        "acceptance": 0.7,
        "concurrency": 1,
        "plain": [batch()],
        "spec": [batch()],
    }
    return RehearsedCase(**(usual | {"num_differing": 0} | given))


def test_every_number_of_drafts_meets_every_concurrency_and_acceptance() -> None:
    found, engines, opener = run()
    assert [each["spec_steps"] for each in opener.settings] == [3, "auto"]
    cases = [(each.steps, each.concurrency, each.acceptance) for each in found.cases]
    assert cases == [(steps, c, a) for steps in ("3", "auto") for c in (1, 3) for a in (0.0, 0.7)]
    assert all(len(each.plain) == len(each.spec) == 2 for each in found.cases)
    assert [acceptance for _, acceptance in engines[0].rehearsed] == [1.0, 0.0, 0.7] * 2
    assert found.cases[0].accepted == 8 / 11  # of 12 drafts, four before which another was refused, and 8 accepted
    assert found.cases[-1].accepted is None
    assert found.is_same
    assert not found.is_partial


def test_what_is_rehearsed_is_what_the_engine_itself_says() -> None:
    """And requests find their replies by their seeds."""
    found, engines, _ = run(backwards)
    first, second = engines[0].rehearsed[:2]
    (prompt,) = (text[:4] for text in first[0].values())
    assert first[0] == {0: prompt + counting(prompt)[:9]}
    assert second[0] == {0: prompt + backwards(prompt)[:9]}
    assert sorted(engines[0].rehearsed[3][0]) == [0, 1, 2]
    assert not found.is_same, "float64 allows no other reply"
    assert [each.num_differing for each in found.cases] == [1, 1, 3, 3] * 2


def test_prompts_are_on_the_device_in_every_run() -> None:
    """So that all requests begin in one step: prefilled over several, steps would differ with what becomes of drafts."""
    _, engines, _ = run()
    log = engines[0].log
    runs = [i for i, line in enumerate(log) if line.startswith(("1 prompts", "3 prompts"))]
    filled, counted = runs[::2], runs[1::2]
    assert len(filled) == len(counted) == 2 * (1 + 2 * (1 + 2))
    assert all(log[i - 1].startswith("flush") for i in filled)
    assert all("prompts, 1 tokens" in log[i] for i in filled)
    assert all(i - 1 in filled and "prompts, 9 tokens" in log[i] for i in counted)


def test_ctrl_c_leaves_what_was_measured() -> None:
    told: list[str] = []

    def advance(words: str) -> None:
        told.append(words)
        if len(told) == 3:
            raise KeyboardInterrupt

    found, _, _ = run(advance=advance)
    assert found.is_partial
    assert len(found.cases) == 3
    assert told[0].startswith("3 drafts, 1 at once, 0 right: ")


def test_ctrl_c_before_the_first_case_is_one() -> None:
    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": ("0",)}, "--steps has none"),
        ({"steps": ("3x6:16",)}, "drafts are rehearsed as chains"),
        ({"proposers": ("mtp", "eagle3")}, "one proposer"),
        ({"steps": ("9999",)}, "--steps has '9999'"),
        ({"temperatures": (0.8,), "batches": (3,)}, "takes no --batches, --temperatures"),
    ],
)
def test_sweeps_of_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"proposers": ("mtp",), "prompt_length": 4, "output_length": 9, "repeats": 2}
    with pytest.raises(ConfigError, match=words):
        run(sweep=SweepOptions(**(options | given)))


def test_bars_are_those_of_chosen_drafts() -> None:
    assert case().bar == 1.3
    assert case(concurrency=4).bar == case(acceptance=0.27).bar == 0.97
    assert case(steps="3").bar is None


def test_the_table_says_which_bars_are_missed_and_the_plot_is_drawn(tmp_path: Path) -> None:
    slow = batch(seconds=2.2)
    cases = [
        case(spec=[slow]),
        case(concurrency=4),
        case(acceptance=0.0),
        case(steps="3"),
        case(concurrency=4, acceptance=0.0),
    ]
    found = Rehearsed(config=make_options(), proposer="mtp", cases=cases)
    console = Console(file=io.StringIO(), width=150)
    show_rehearsed(console, found)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "auto against off, at least 1.3: 0 of 1; the least is 0.91",
        "at least 0.97: 3 of 3",
        "all 11 replies",
    ):
        assert words in shown, shown
    path = tmp_path / "rehearsed.png"
    draw_rehearsed(Plotter(path), "Rehearsed", found)
    assert path.stat().st_size > 20_000


def test_a_cpu_gets_few_requests_at_once_unless_more_are_asked_for() -> None:
    config, open_to_all = make_options(device="cpu"), RehearsalOptions(sweep=True)
    assert fitted(config, SWEEP, open_to_all).batches == (1, 4)
    assert fitted(config, SWEEP, REHEARSAL).batches == (1, 3)
