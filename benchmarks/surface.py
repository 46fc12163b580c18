"""Entries of the page of figures: constrained replies, and the API process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bars import at_least, at_most
from benchmarks.grammars import BARS
from benchmarks.record import RESULTS, spread_text

Found = dict[str, Any]
Read = Callable[[str], Found]  # the content of a result file, by its name
BEFORE_BAR = 1.01  # of steps without grammars, to those before there were any


def surface(result: Read) -> Iterator[tuple[str, str, Found]]:
    """Yields the entries: a name, its figures with their bars, and the result file."""
    for part in (before_the_first_token, drafts, steps, api_process):
        yield from part(result)


def before_the_first_token(result: Read) -> Iterator[tuple[str, str, Found]]:
    """Yields verdicts, masks and first tokens."""
    vetting = result("vetting")
    found, bars = vetting["found"], vetting["bars"]
    p50, p99, memory, mask = (
        f"{found[name]:.{digits}f} {unit} {at_most(found[name], bars[name])}"
        for name, digits, unit in (
            ("verdict_ms_p50", 1, "ms"),
            ("verdict_ms_p99", 0, "ms"),
            ("schemas_mib", 0, "MiB"),
            ("mask_us_mean", 0, "µs"),
        )
    )
    yield (
        f"{vetting['schemas']['tried']:,} drawn schemas, 131,072 tokens, CPU time: verdict on an unseen one, p50 and p99; memory of "
        f"{vetting['schemas']['followed']} in a worker; a mask, mean",
        f"{p50}, {p99}; {memory}; {mask}",
        vetting,
    )
    for path in sorted(RESULTS.glob("first_constrained*.json")):
        run = result(path.stem)
        figures, clock = run[run["judged"]], "CPU time of the server" if run["judged"] == "cpu_ms" else "time"
        known, unseen = run["bars"]
        yield (
            f"first token of a prompt of {run['prompt_tokens']} tokens, {clock}: known grammar / none; p99 under an unseen one less the median "
            "without",
            f"{figures[known]:.3f} {at_most(figures[known], run['bars'][known])}; "
            f"{figures[unseen]:.0f} ms {at_most(figures[unseen], run['bars'][unseen])}",
            run,
        )


def drafts(result: Read) -> Iterator[tuple[str, str, Found]]:
    """Yields accept lengths under grammars."""
    accepted = result("accept_constrained")
    ratios = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in accepted["ratios"].items())
    yield (
        "hiserve-nano, accept length of three drafts under a grammar / without, of the same replies",
        f"{ratios} {at_least(min(accepted['ratios'].values()), accepted['bar'])}",
        accepted,
    )


def steps(result: Read) -> Iterator[tuple[str, str, Found]]:
    """Yields steps under distinct schemas against free ones, and free steps against those before there were grammars."""
    run, told = result("grammars"), []
    cases = dict.fromkeys(tuple(name.split(", ")[:2]) for name in run if name.endswith(" rows"))
    for shape, spec in cases:
        ratios = [run[name]["ratios"] for name in run if name.startswith(f"{shape}, {spec}, ")]
        constrained = [each["constrained"] for each in ratios]
        beside = [each["beside"] for each in ratios if "beside" in each]
        told.append(
            f"{shape}, {'no drafts' if spec == 'off' else spec}: {min(constrained):.3f} to {max(constrained):.3f} "
            f"{at_most(max(constrained), BARS.get(shape, BARS[spec]))}, "
            f"free rows beside {min(beside):.3f} to {max(beside):.3f} {at_most(max(beside), BARS['beside'])}"
        )
    yield "time of a step, 1 to 128 rows, each under a schema of its own / free", "; ".join(told), run
    before = result("decode_before_after")
    ratios = [each["ratio"] for name, each in before["figures"].items() if name.startswith("llama-8b")]
    yield (
        "Llama-8B shape, steps without grammars / at a69809e, which had none",
        f"{min(ratios):.3f} to {max(ratios):.3f} {at_most(max(ratios), BEFORE_BAR)}",
        before,
    )


def api_process(result: Read) -> Iterator[tuple[str, str, Found]]:
    """Yields the entries of the API process: reader, protocols, traces."""
    for path in sorted(RESULTS.glob("api_process*.json")):
        run = result(path.stem)
        told = [
            f"{name}: {spread_text(run['ratios_of_rounds'][name], '.3f')} {at_least(run['ratios'][name], bar)}"
            for name, bar in run["bars"].items()
        ]
        yield (
            f"CPU time of the API process for a token of {run['streams']} streams, ratios of without to with",
            "; ".join(told),
            run,
        )
