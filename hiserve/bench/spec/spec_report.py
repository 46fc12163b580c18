"""The tables of speculation on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.bench.margin import MAX_SHARE
from hiserve.bench.report import columns
from hiserve.bench.spec.equality import over_all
from hiserve.bench.spec.spec_run import Found
from hiserve.bench.spec.spec_summary import Case, CycleCost, acceptance, crossover, drafts_of, figures_of
from hiserve.core.usage import DraftUse

GOOD, BAD = "green", "red"
GAINS = (
    "accept: tokens of a step that verified drafts, by where its prompt was found\n"
    "% accepted: of those steps, their first draft, their second one, ...\n"
    "gain: tokens a second over plain decoding, by batch; prompts {where}\n"
    "loses from: the batch from which on plain decoding is faster"
)
COSTS = (
    "extend: the draft forward behind the step, for the first draft; draft: further ones\n"
    "cost: the sum in plain steps, as measured at start, and beside it as it ran"
)


def show_spec(console: Console, found: Found) -> None:
    """Shows a table for each proposer and temperature, what cycles cost, and whether the tokens are the same."""
    for proposer, temperature in dict.fromkeys((case.proposer, case.temperature) for case in found.cases):
        chosen = [case for case in found.cases if (case.proposer, case.temperature) == (proposer, temperature)]
        console.print(_gains(f"{proposer}, temperature {temperature:g}", chosen))
    console.print(f"[dim]{GAINS.format(where=_where(usual_source(found.cases)))}[/dim]")
    for proposer, costs in found.costs.items():
        console.print(_costs(proposer, costs, [case for case in found.cases if case.proposer == proposer]))
    if found.costs:
        console.print(f"[dim]{COSTS}[/dim]")
    _equality(console, found.cases)


def usual_source(cases: Sequence[Case]) -> str:
    """Returns the source by which cases are timed: with prompts on the device, if that was measured."""
    sources = list(dict.fromkeys(case.source for case in cases))
    return "device" if "device" in sources else sources[0]


def _gains(title: str, cases: Sequence[Case]) -> Table:
    source = usual_source(cases)
    sources = list(dict.fromkeys(case.source for case in cases))
    batches = list(dict.fromkeys(case.batch for case in cases))
    shares, lengths_of = "% accepted\nby place", [f"accept\n{name}" for name in sources]
    gains = [f"gain\nat {batch}" for batch in batches]
    table = columns(title, "drafts", *lengths_of, shares, *gains, "loses\nfrom", left=shares)
    for steps in dict.fromkeys(case.steps for case in cases):
        own = [case for case in cases if case.steps == steps]
        speedups = {case.batch: figures_of(case).speedup for case in own if case.source == source}
        drafts = drafts_of(own)
        lengths = (drafts_of([case for case in own if case.source == name]) for name in sources)
        lost = crossover(speedups)
        table.add_row(
            steps,
            *(f"{use.accept_length:.2f}" if use.proposed else "-" for use in lengths),
            " ".join(f"{100 * share:.0f}" for share in _acceptance(drafts)) or "-",
            *(_coloured(speedups[batch]) for batch in batches),
            "-" if lost is None else str(lost),
        )
    return table


def _costs(proposer: str, costs: Sequence[CycleCost], cases: Sequence[Case]) -> Table:
    """Shows what the engine measured at start, for what was swept, beside what steps then took."""
    names = ("batch", "drafts", "plain", "verify", "extend", "draft", "cost", "as it ran")
    table = columns(f"{proposer}, cost of a cycle in milliseconds", *names)
    source, temperature = usual_source(cases), cases[0].temperature
    ran = {
        (case.batch, case.steps): figures_of(case)
        for case in cases
        if (case.source, case.temperature) == (source, temperature)
    }
    sizes = sorted({cost.batch for cost in costs})
    for batch in dict.fromkeys(batch for batch, _ in ran):
        nearest = next((size for size in sizes if size >= batch), sizes[-1])  # as the engine itself reads its table
        for cost in (cost for cost in costs if cost.batch == nearest and (batch, str(cost.steps)) in ran):
            parts = (cost.plain_s, cost.verify_s, cost.extend_s, cost.draft_s)
            table.add_row(
                str(batch),
                str(cost.steps),
                *(f"{1e3 * seconds:.2f}" for seconds in parts),
                f"{cost.cost:.2f}",
                f"{ran[batch, str(cost.steps)].cycle_cost:.2f}",
            )
        table.add_section()
    return table


def _equality(console: Console, cases: Sequence[Case]) -> None:
    counts = Counter(case.equality.verdict for case in cases)
    told = ", ".join(f"{count} of {len(cases)} {verdict}" for verdict, count in counts.items())
    console.print(f"[bold]tokens against plain decoding[/bold], case by case: {told}")
    margin = over_all([case.equality for case in cases])
    if margin is not None:
        colour = GOOD if margin.is_kept else BAD
        console.print(
            f"[{colour}]{margin.num_needed} of {margin.num_positions} tokens are not plain decoding's best; the worst is "
            f"{margin.worst:.2g} short of it, {margin.epsilon:.2g} and {MAX_SHARE:.1%} are allowed[/{colour}]"
        )
    for case in cases:
        if not case.equality.is_kept:
            first = case.equality.first_difference
            where = "" if first is None else f", first in reply {first[0]} at token {first[1]}"
            console.print(
                f"[{BAD}]{escape(case.proposer)}, {case.steps} drafts, batch {case.batch}, temperature {case.temperature:g}, "
                f"{case.source}: {case.equality.num_differing} of {case.equality.num_replies} replies differ{where}[/{BAD}]"
            )


def _acceptance(drafts: DraftUse) -> list[float]:
    """Returns shares of verifying steps, up to the last draft that was ever accepted."""
    shares = acceptance(drafts)
    while shares and not shares[-1]:
        shares.pop()
    return shares


def _coloured(speedup: float) -> str:
    colour = GOOD if speedup >= 1 else BAD
    return f"[{colour}]{speedup:.2f}[/{colour}]"


def _where(source: str) -> str:
    return "that nobody has" if source == "cold" else f"on the {source}"
