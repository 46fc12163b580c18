"""The tables on the terminal: of a run, of rounds, of the cache, of speculation, of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.bench.cache_run import CacheOutcome
from hiserve.bench.cache_summary import CacheSummary
from hiserve.bench.equality import MAX_SHARE, over_all
from hiserve.bench.offline import OfflineSummary
from hiserve.bench.soak.soak_summary import SoakFigures
from hiserve.bench.spec_run import Case, CycleCost, Found, acceptance, crossover, drafts_of, figures_of
from hiserve.bench.summary import Goodput, Round, Spread, Summary
from hiserve.bench.workload import Run, Workload
from hiserve.core.usage import DraftUse

# Above this share of a core the load generator may be the bottleneck.
BUSY_CLIENT = 0.7
MAX_SHOWN_ERRORS = 5
MAX_VIOLATIONS = 8
GOOD, BAD = "green", "red"
GAINS = (
    "accept: tokens of a step that verified drafts, by the tier of its prompt\n"
    "% accepted: of those steps, their first draft, their second one, ...\n"
    "gain: tokens a second over plain decoding, by batch; prompts {where}\n"
    "loses from: the batch from which on plain decoding is faster"
)
COSTS = (
    "extend: the draft forward after the step, for the first draft; draft: further ones\n"
    "cost: the sum in plain steps, as measured at start, and beside it as it ran"
)


def columns(title: str, *names: str, left: str = "") -> Table:
    """Returns a table with a name over each column; numbers stand right, the column named ``left`` does not."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def pairs(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _spreads(table: Table, spreads: Iterable[tuple[str, Spread]], *fields: str) -> Table:
    """Adds a row for each spread that has values: some of its fields, and their count."""
    for name, spread in spreads:
        if spread.count:
            table.add_row(name, *(f"{getattr(spread, field):,.2f}" for field in fields), f"{spread.count:,}")
    return table


def _throughput(table: Table, found: Summary | OfflineSummary) -> None:
    table.add_section()
    table.add_row("request throughput", f"{found.requests_per_s:.2f} requests/s")
    table.add_row("input throughput", f"{found.input_tokens_per_s:,.1f} tokens/s")
    table.add_row("[bold]output throughput[/bold]", f"[bold]{found.output_tokens_per_s:,.1f} tokens/s[/bold]")
    if isinstance(found, Summary) and found.steady is not None:
        steady = found.steady
        span = f"{steady.begin_s:.1f} to {steady.end_s:.1f} s, ≥ {steady.min_in_flight} in flight"
        table.add_row("  without ramp and tail", f"{steady.output_tokens_per_s:,.1f} tokens/s ({span})")
    table.add_row("total throughput", f"{found.total_tokens_per_s:,.1f} tokens/s")


def show_run(console: Console, title: str, summary: Summary) -> None:
    table = pairs(title)
    table.add_row("requests that ended well", f"{summary.num_ok:,} of {summary.num_requests:,}")
    for kind, count in summary.errors.items():
        table.add_row(f"[red]failed: {escape(kind)}[/red]", f"[red]{count:,}[/red]")
    if summary.num_silent:
        table.add_row("[yellow]replies without text (no TTFT)[/yellow]", f"{summary.num_silent:,}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("input tokens", f"{summary.num_prompt:,}")
    share = summary.cached_share
    table.add_row("  of these cached", "not told" if share is None else f"{summary.num_cached:,} ({share:.1%})")
    table.add_row("output tokens", f"{summary.num_output:,}{'' if summary.has_usage else ' (chunks; no usage told)'}")
    _throughput(table, summary)
    table.add_row("in flight, peak and mean", f"{summary.peak_in_flight} and {summary.mean_in_flight:.1f}")
    busy = f"{summary.client_cpu_share:.1%} of a core"
    table.add_row("load generator", f"[red]{busy}: too busy[/red]" if summary.client_cpu_share > BUSY_CLIENT else busy)
    console.print(table)
    table = columns("milliseconds", "", "mean", "median", "p90", "p99", "values")
    for name, spread in (
        ("TTFT (first token)", summary.ttft_ms),
        ("TPOT (per request)", summary.tpot_ms),
        ("ITL per chunk", summary.itl_chunk_ms),
        ("ITL per token", summary.itl_token_ms),
        ("E2EL (whole request)", summary.e2el_ms),
        ("waited to be sent", summary.late_ms),
    ):
        if spread is None or not spread.count:
            table.add_row(name, *["–"] * 4, "not told" if spread is None else "0")
        else:
            _spreads(table, [(name, spread)], "mean", "median", "p90", "p99")
    console.print(table)


def show_errors(console: Console, run: Run) -> None:
    said = Counter((sample.error, sample.detail) for sample in run.samples if sample.error)
    for (kind, detail), count in said.most_common(MAX_SHOWN_ERRORS):
        console.print(f"[red]{count:,} × {escape(kind)}:[/red] {escape(detail)}", soft_wrap=True)


def show_notes(console: Console, workload: Workload) -> None:
    """Shows what was done to the data."""
    if workload.notes:
        done = ", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in workload.notes.items())
        size = f"{workload.num_turns:,} requests in {len(workload.sessions):,} sessions"
        console.print(f"{workload.name}, {size}; {done}")


def show_goodput(console: Console, found: Goodput) -> None:
    table = pairs("goodput")
    table.add_row("[bold]goodput[/bold]", f"[bold]{found.requests_per_s:.2f} requests/s[/bold]")
    table.add_row("requests that met all", f"{found.num_good:,} ({found.attainment:.1%})")
    for name, limit_ms in found.objectives_ms.items():
        table.add_row(f"  {name.upper()} ≤ {limit_ms:g} ms", f"{found.attainment_of[name]:.1%}")
    console.print(table)


def show_rounds(console: Console, rounds: Sequence[Round], num_without_ids: int) -> None:
    names = ("round", "ok", "TTFT median ms", "p90", "p99", "prompt tokens", "hit rate", "best possible")
    table = columns("rounds", *names)
    for each in rounds:
        ttft = each.ttft_ms
        hit = "not told" if each.hit_rate is None else f"{each.hit_rate:.1%}"
        cells = (f"{ttft.median:,.2f}", f"{ttft.p90:,.2f}", f"{ttft.p99:,.2f}", f"{each.num_prompt:,}")
        table.add_row(str(each.number), f"{each.num_ok:,}", *cells, hit, f"{each.best_hit_rate:.1%}")
    console.print(table)
    if num_without_ids:
        shown = f"{num_without_ids:,} replies came without token ids; later prompts go on without them."
        console.print(f"[yellow]{shown}[/yellow]")


def show_offline(console: Console, title: str, summary: OfflineSummary) -> None:
    table = pairs(title)
    table.add_row("requests", f"{summary.num_requests:,}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("input tokens", f"{summary.num_prompt:,}")
    table.add_row("  of these cached", f"{summary.num_cached:,}")
    table.add_row("output tokens", f"{summary.num_output:,}")
    _throughput(table, summary)
    console.print(table)


def show_cache(console: Console, found: CacheOutcome, summary: CacheSummary) -> None:
    """Shows hit rates beside those of an endless cache, then TTFT by kind of hit."""
    console.print(_hit_rates(found, summary))
    table = columns("TTFT by kind of hit, milliseconds", "", "median", "p90", "p99", "requests")
    console.print(_spreads(table, summary.ttft_ms.items(), "median", "p90", "p99"))
    if summary.num_above_most:
        console.print(
            f"[yellow]{summary.num_above_most:,} requests found more than an endless cache: the server's was not "
            "empty when the run began. Give --flush-cache; a store is emptied by POST /flush_cache?tier=store.[/yellow]"
        )
    if found.num_differing:
        shown = f"{found.num_differing:,} prompts are of another length to the server than to the endless cache."
        console.print(f"[yellow]{shown}[/yellow]")


def _hit_rates(found: CacheOutcome, summary: CacheSummary) -> Table:
    table = pairs(f"cache, pages of {found.page_size} tokens")
    if summary.hit_rate is None:
        table.add_row("hit rate", "not told")
    else:
        table.add_row("[bold]hit rate[/bold]", f"[bold]{summary.hit_rate:.2%}[/bold]")
        for tier, rate in summary.hit_rate_of.items() if summary.tells_tiers else ():
            table.add_row(f"  {tier}", f"{rate:.2%}")
    table.add_row("endless cache", f"{summary.least_hit_rate:.2%} to {summary.most_hit_rate:.2%}")
    if summary.share_of_most is not None:
        table.add_row("  share of the most", f"{summary.share_of_most:.4f}")
    for reason, count in summary.misses.items():
        table.add_row(f"requests that missed: {escape(reason)}", f"{count:,}")
    table.add_section()
    table.add_row("input throughput", f"{summary.input_tokens_per_s:,.1f} tokens/s")
    if summary.later_input_tokens_per_s is not None:
        table.add_row("  from second requests on", f"{summary.later_input_tokens_per_s:,.1f} tokens/s")
    if any(copied.num_pages for copied in found.copies.values()):
        table.add_section()
    for kind, copied in found.copies.items():
        if copied.num_pages:
            speed = "" if copied.bytes_per_s is None else f" at {copied.bytes_per_s / 1e9:,.2f} GB/s"
            table.add_row(kind, f"{copied.num_pages:,} pages, {copied.num_bytes / 1e6:,.1f} MB{speed}")
        for reason, count in copied.unfulfilled.items():
            table.add_row(f"  not done: {escape(reason)}", f"{count:,} pages")
    for note in found.notes:
        table.add_row("[yellow]not told[/yellow]", escape(note))
    return table


def show_spec(console: Console, found: Found) -> None:
    """Shows a table for each proposer and temperature, the costs of cycles, and whether the tokens are the same."""
    for proposer, temperature in dict.fromkeys((case.proposer, case.temperature) for case in found.cases):
        chosen = [case for case in found.cases if (case.proposer, case.temperature) == (proposer, temperature)]
        console.print(_gains(f"{proposer}, temperature {temperature:g}", chosen))
    source = usual_source(found.cases)
    where = "on no tier" if source == "cold" else f"on the {source}"
    console.print(f"[dim]{GAINS.format(where=where)}[/dim]")
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
    table = columns(
        title, "drafts", *lengths_of, shares, *(f"gain\nat {batch}" for batch in batches), "loses\nfrom", left=shares
    )
    for steps in dict.fromkeys(case.steps for case in cases):
        own = [case for case in cases if case.steps == steps]
        speedups = {case.batch: figures_of(case).speedup for case in own if case.source == source}
        lengths = (drafts_of([case for case in own if case.source == name]) for name in sources)
        lost = crossover(speedups)
        table.add_row(
            steps,
            *(f"{use.accept_length:.2f}" if use.proposed else "-" for use in lengths),
            " ".join(f"{100 * share:.0f}" for share in _ever_accepted(drafts_of(own))) or "-",
            *(_coloured(f"{speedups[batch]:.2f}", speedups[batch] >= 1) for batch in batches),
            "-" if lost is None else str(lost),
        )
    return table


def _costs(proposer: str, costs: Sequence[CycleCost], cases: Sequence[Case]) -> Table:
    """Shows the costs that the engine measured at start, for all that was swept, beside those of the steps."""
    names = ("batch", "drafts", "plain", "verify", "extend", "draft", "cost", "as it ran")
    table = columns(f"{proposer}, cost of a cycle in milliseconds", *names)
    timed = usual_source(cases), cases[0].temperature
    ran = {(case.batch, case.steps): figures_of(case) for case in cases if (case.source, case.temperature) == timed}
    sizes = sorted({cost.batch for cost in costs})
    for batch in dict.fromkeys(batch for batch, _ in ran):
        nearest = next((size for size in sizes if size >= batch), sizes[-1])  # as the engine itself reads its table
        for cost in (cost for cost in costs if cost.batch == nearest and (batch, str(cost.steps)) in ran):
            parts = (f"{1e3 * s:.2f}" for s in (cost.plain_s, cost.verify_s, cost.extend_s, cost.draft_s))
            as_it_ran = ran[batch, str(cost.steps)].cycle_cost
            table.add_row(str(batch), str(cost.steps), *parts, f"{cost.cost:.2f}", f"{as_it_ran:.2f}")
        table.add_section()
    return table


def _equality(console: Console, cases: Sequence[Case]) -> None:
    counts = Counter(case.equality.verdict for case in cases)
    shown = ", ".join(f"{count} of {len(cases)} {verdict}" for verdict, count in counts.items())
    console.print(f"[bold]tokens against plain decoding[/bold], case by case: {shown}")
    margin = over_all([case.equality for case in cases])
    if margin is not None:
        shown = (
            f"{margin.num_needed} of {margin.num_positions} tokens are not plain decoding's best; the worst is "
            f"{margin.worst:.2g} short of it, {margin.epsilon:.2g} and {MAX_SHARE:.1%} are allowed"
        )
        console.print(_coloured(shown, margin.is_kept))
    for case in cases:
        if not case.equality.is_kept:
            first = case.equality.first_difference
            where = "" if first is None else f", first in reply {first[0]} at token {first[1]}"
            shown = (
                f"{escape(case.proposer)}, {case.steps} drafts, batch {case.batch}, temperature {case.temperature:g}, "
                f"{case.source}: {case.equality.num_differing} of {case.equality.num_replies} replies differ{where}"
            )
            console.print(_coloured(shown, is_good=False))


def _ever_accepted(drafts: DraftUse) -> list[float]:
    """Returns shares of verifying steps, up to the last draft that was ever accepted."""
    shares = acceptance(drafts)
    while shares and not shares[-1]:
        shares.pop()
    return shares


def _coloured(text: str, is_good: bool) -> str:
    colour = GOOD if is_good else BAD
    return f"[{colour}]{text}[/{colour}]"


def show_soak(console: Console, title: str, found: SoakFigures) -> None:
    """Shows requests by outcome, faults, latencies beside them, memory, and violations."""
    table = pairs(title)
    for outcome, count in found.outcomes.items():
        table.add_row(f"requests: {escape(outcome)}", f"{count:,}")
    table.add_row("duration", f"{found.duration_s:.1f} s")
    if found.num_processes:
        lived = ", ".join(f"{count} {role}" for role, count in found.num_processes.items())
        table.add_row("processes that lived", lived)
    judged = "token by token" if found.is_exact else "by their ends alone: not a server in float64"
    table.add_row("replies compared", judged)
    console.print(table)
    if found.faults:
        table = columns("faults", "at", "fault", "requests open", "ready again", "first new token", left="fault")
        for fault in found.faults:
            shown = ["–" if seconds is None else f"{seconds:.2f} s" for seconds in (fault.ready_s, fault.recovery_s)]
            table.add_row(f"{fault.at_s:.1f} s", f"{fault.fault}: {escape(fault.what)}", f"{fault.num_open}", *shown)
        console.print(table)
    spreads = [
        (f"{kind}, {name}", spread)
        for name, each in (("calm", found.calm), ("beside faults", found.beside_faults))
        for kind, spread in (("TTFT", each.ttft_ms), ("TPOT", each.tpot_ms))
    ]
    console.print(_spreads(columns("milliseconds", "", "p50", "p99", "requests"), spreads, "median", "p99"))
    if found.growth:
        table = columns("memory", "process", "over", "at the end", "growth", "")
        for grown in found.growth:
            size, slope = f"{grown.last_mib:.0f} MiB", f"{grown.mib_per_min:+.2f} MiB/min"
            remark = "" if grown.is_judged else "too short to judge"
            table.add_row(f"{grown.role} {grown.pid}", f"{grown.seconds:.0f} s", size, slope, remark)
        console.print(table)
    console.print(_coloured(f"violations: {found.num_violations:,}", not found.num_violations))
    for violation in found.violations[:MAX_VIOLATIONS]:
        console.print(f"[red]  {escape(violation)}[/red]", soft_wrap=True)
