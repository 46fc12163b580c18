"""Writes the README's figures from the result files: ``python benchmarks/readme.py [--check]``."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu.eligible import replays
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import PEER, PEER_DATE
from benchmarks.measured import is_current
from benchmarks.spread import spread_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
THEN = f"{PEER} in another run, of {PEER_DATE}"
# Parts of benchmarks.gpu, and what is said of their figures, which are shares of a limit or times as fast as something.
GPU_PARTS = {
    "decode": "Llama-8B shape, decode step of rows x context, against reading weights, keys and values at a copy's rate",
    "prefill": f"the same, prompts at once: against the rate of a matrix product; against {THEN}",
    "peers": f"the same, rows x prompt -> output tokens, against {THEN}",
    "chats": f"the same, 1024 tokens in common, 512 new and 64 out a turn, against {THEN}",
    "conversations": f"the same, over a device pool of 64k tokens with a host tier, 256 new and 16 out a turn, against {THEN}",
    "graphs": "the same, as fast as without graphs",
    "traffic": "the same, conversations that come from the host beside 8 decoding rows: steps replayed as graphs",
    "small-decode": "Qwen3-0.6B shape, decode step of rows x context, as above",
    "overlap": "the same, as fast as steps planned one after the other",
    "http": "Llama-8B shape over HTTP, as fast as in one process",
    "small-http": "Qwen3-0.6B shape over HTTP, as fast as in one process",
    "spec": "hiserve-nano and its draft heads widened to the Llama-8B shape: speed-up over plain decoding against accept length / "
    "least cost of a cycle; drafts chosen step by step against the best fixed number; replies as without",
}
START, END = "<!-- figures: benchmarks/readme.py -->\n", "<!-- end of figures -->\n"


def result(name: str) -> dict[str, Any]:
    """Reads one result file."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def source(found: dict[str, Any]) -> str:
    """Says where a figure comes from, and whether the code that it measures has changed since."""
    at = f" at {found['commit']}" if "commit" in found else ""
    changed = "" if is_current(found) else "; **the code has changed since**"
    return f"{found['hardware']}; `{found['command']}`, {found['date']}{at}{changed}"


def planned(cases: list[dict[str, Any]], name: str) -> list[str]:
    """Returns each case with its spread and bar."""
    lines = []
    for case in cases:
        samples = case["samples"]
        each = samples.get(name) or [sum(both) for both in zip(samples["plan_us"], samples["commit_us"], strict=True)]
        bar = case["bar_us"]
        lines.append(f"{spread_text(each, '.0f', ' µs')} (≤ {bar:.0f}{missed(case['median'][name] <= bar)})")
    return lines


def against(samples: dict[str, list[float]], ours: str, theirs: str, bar: float) -> str:
    """Returns how many times as fast ours was, round by round, with the bar."""
    ratios = [one / other for one, other in zip(samples[ours], samples[theirs], strict=True)]
    return f"{spread_text(ratios, '.2f', ' ×')} {at_least(statistics.median(ratios), bar)}"


def missed(is_met: bool) -> str:
    """Returns what is said of a bar."""
    return "" if is_met else ": missed"


def at_most(figure: float, bar: float, unit: str = "") -> str:
    """Returns a bar that a figure may reach, and whether it is above it."""
    return f"(≤ {bar:g}{unit}{missed(figure <= bar)})"


def at_least(figure: float, bar: float, unit: str = "") -> str:
    """Returns a bar that a figure should reach, and whether it is below it."""
    return f"(≥ {bar:g}{unit}{missed(figure >= bar)})"


def rows() -> list[tuple[str, str, str]]:
    """Returns (what, figure with its bar, source)."""
    turn, radix, planner, cuda = (result(name) for name in ("second_turn", "radix", "planner", "cuda_eager"))
    offline, serving = result("offline"), result("serving")
    server = cuda["servers"][0]
    memory_mb = serving.get("rss_mb", [serving["found"]["api_rss_mb"]])
    match = radix["results"][0]
    ratios = [each["second_turn_ms"] / each["second_turn_uncached_ms"] for each in turn["rounds"]]
    turns = f"{turn['second_turn_ms']:.0f} ms / {turn['second_turn_uncached_ms']:.0f} ms = {spread_text(ratios, '.2f')}"
    plans = planned([case for case in planner["results"] if "rows" in case], "plan_and_commit_us")
    nodes = planned([case for case in planner["results"] if "nodes" in case][::3], "publish_and_store_us")
    return [
        (
            "second turn of a 2,000-token conversation: first token, cached / uncached",
            f"{turns} {at_most(statistics.median(ratios), turn['bar'])}",
            source(turn),
        ),
        (
            "offline, 8 rows, 256 → 128 tokens, float32: against transformers one by one, batched",
            " and ".join(
                against(offline["samples_tokens_per_s"], "hiserve", name, offline["bars"][name])
                for name in ("one by one", "batched")
            ),
            source(offline),
        ),
        (
            "over HTTP at 32 streams against offline; start to ready; memory of the API process",
            f"{against(serving['samples'], 'http', 'offline', serving['bars']['http_over_offline'])}; "
            f"{spread_text(serving['starts_s'], '.1f', ' s')} "
            f"{at_most(statistics.median(serving['starts_s']), serving['bars']['ready_s'])}; "
            f"{spread_text(memory_mb, '.0f', ' MB')} {at_most(statistics.median(memory_mb), serving['bars']['api_rss_mb'])}",
            source(serving),
        ),
        (
            "match + lock + release of 100k tokens over 300 nodes, against memcmp",
            f"{spread_text(match['samples']['match_lock_release_us'], '.0f', ' µs')} = {match['ratio_to_memcmp']:.0f} × "
            f"{at_most(match['ratio_to_memcmp'], match['bar_ratio'], ' ×')}",
            source(radix),
        ),
        ("plan + commit of a step, 32 and 256 decoding rows, one tier", ", ".join(plans[:2]), source(planner)),
        ("the same, every page written through to the host", ", ".join(plans[2:]), source(planner)),
        ("publication and backup of a node of 1 and 64 pages, planning thread", ", ".join(nodes), source(planner)),
        *heads(),
        *recovery(),
        *soak(),
        *tiers(),
        *gpu(),
        (
            "hiserve-nano's server on a GPU, eager: 128 streams; first token of the second turn",
            f"{server['loads'][-1]['tokens_per_s']:.0f} tokens/s; {server['turns'][1]['ttft_ms']:.0f} ms",
            source(cuda),
        ),
    ]


def heads() -> list[tuple[str, str, str]]:
    """Returns the rows about hiserve-nano's draft heads."""
    accepted, speed = result("nano_acceptance"), result("nano_spec")
    lengths, differences = [], []
    for kind in ("eagle3", "mtp"):
        found = accepted[kind]
        length, drawn = found["served"]["dialogues"]["served"], found["drawn"]["coupled"]
        told = f"{length['accept_length']:.2f} {at_least(length['accept_length'], accepted['bars'][kind])}"
        lengths.append(f"{told}, {drawn['accept_length']:.2f} at temperature {found['drawn']['temperature']}")
        differences += [abs(each["difference"]) for each in found["served"].values()]
    shares = f"{max(differences):.1%} {at_most(100 * max(differences), 100 * accepted['max_difference'], '%')}"
    speedups = " and ".join(
        against(
            {
                name: [sum(round_) for round_ in zip(*each, strict=True)]
                for name, each in speed[kind]["seconds"].items()
            },
            "plain",
            "default",
            speed["bar"],
        )
        for kind in ("dialogue", "code")
    )
    return [
        (
            "hiserve-nano in held-out dialogues, accept length as `usage` has it: EAGLE-3 with three drafts, MTP with one; served off predicted",
            f"{'; '.join(lengths)}; {shares}",
            source(accepted),
        ),
        (
            "hiserve-nano on a CPU, one stream, as it comes against `--spec off`: dialogue and code",
            speedups,
            source(speed),
        ),
    ]


def recovery() -> list[tuple[str, str, str]]:
    """Returns the rows about workers that die."""
    rows = []
    for path in sorted(RESULTS.glob("recovery*.json")):
        run = result(path.stem)
        median, bars, load = run["median"], run["bars"], run["load"]
        seconds, hits, share = median["without_weights_s"], median["host_share"], run["supervision"]["share"]
        rounds, shares = run["rounds"], run.get("supervision_shares", [share])
        settings = run["settings"]
        rows.append(
            (
                f"{settings.get('shape', settings.get('model'))}, worker killed under {load['streams']} streams: first new token, "
                "weights not counted; replayed tokens from the host; supervision and ledger of the CPU time meanwhile",
                f"{spread_text([each['without_weights_s'] for each in rounds], '.1f', ' s')} "
                f"{at_most(seconds, bars['without_weights_s'])}; "
                f"{spread_text([each['host_share'] for each in rounds], '.2f')} "
                f"{at_least(hits, bars['host_share'])}; "
                f"{spread_text(shares, '.2%')} {at_most(100 * share, 100 * bars['supervision_share'], '%')}",
                source(run),
            )
        )
    return rows


def soak() -> list[tuple[str, str, str]]:
    """Returns the rows about servers under load for long: one that everything strikes, one left in peace."""
    rows = []
    for path in sorted(RESULTS.glob("soak*.json")):
        run = result(path.stem)
        found = run["soak"]
        counted = Counter(fault["fault"] for fault in found["faults"])
        struck = ", ".join(f"{count} {fault}" for fault, count in sorted(counted.items())) or "no faults"
        felt_s = [fault["recovery_s"] for fault in found["faults"] if fault["recovery_s"] is not None]
        felt = f"median {statistics.median(felt_s):.1f} s, longest {max(felt_s):.1f} s" if felt_s else "-"
        grown = [(each["role"], each["mib_per_min"]) for each in found["growth"] if each["is_judged"]]
        slopes = ", ".join(f"{role} {slope:.2f}" for role, slope in grown)
        rows.append(
            (
                f"hiserve-nano in float64 under load for {found['duration_s'] / 60:.0f} minutes ({struck}): violations of its "
                "oracle; first new token behind a process that died or hung; growth of processes older than ten minutes",
                f"{found['num_violations']} (≤ 0{missed(not found['num_violations'])}); {felt}; "
                f"{slopes} MiB a minute (≤ 1{missed(max(slope for _, slope in grown) <= 1)})",
                source(run | {"date": run["date"][:10]}),
            )
        )
    return rows


def tiers() -> list[tuple[str, str, str]]:
    """Returns the rows about the host tier on a GPU."""
    cache, copy = result("cache"), result("copy")
    hit, others, kept = (cache["parts"][name] for name in ("hit", "others", "conversations"))
    longer, recompute = (hit["ratios"][name] for name in ("hit over the longer half", "hit over recompute"))
    slower, stored = (
        others["ratios"]["others' p99 while loading"],
        cache["parts"]["write_through"]["ratios"]["write-through"],
    )
    rates = [
        copy["shapes"][shape][f"{way}_anywhere"]["of_ceiling"] for shape in copy["shapes"] for way in ("load", "store")
    ]
    return [
        (
            "Llama-8B shape, 16k tokens from the host + 256 new: first token, against the longer of load and prefill, "
            "against computing all",
            f"{1e3 * hit['ttft_s']:.0f} ms = {longer:.2f} × {at_most(longer, 1.5)}, "
            f"{recompute:.2f} × {at_most(recompute, 0.15)}",
            source(cache),
        ),
        (
            "the same: p99 time per token of 8 others during such a load; time per token with write-through",
            f"{slower:.2f} × {at_most(slower, 1.15)}, {stored:.3f} × {at_most(stored, 1.03)}",
            source(cache),
        ),
        (
            "the same: 32 conversations of 6k tokens over a device pool of 64k, input tokens/s with host tier and without",
            f"{kept['host']['input_tokens_per_s']:.0f} / {kept['device']['input_tokens_per_s']:.0f} "
            f"= {kept['ratios']['conversations']:.1f} × {at_least(kept['ratios']['conversations'], 3)}",
            source(cache),
        ),
        (
            "host to device and back, of pinned-copy bandwidth: pages of 2 MiB, of 64 KiB",
            f"{rates[0]:.3f} and {rates[1]:.3f} {at_least(min(rates[:2]), 0.9)}, "
            f"{rates[2]:.3f} and {rates[3]:.3f} {at_least(min(rates[2:]), 0.8)}",
            source(copy),
        ),
    ]


def gpu() -> list[tuple[str, str, str]]:
    """Returns the rows of the parts of all runs of ``benchmarks.gpu``; of a part that ran twice the later file's."""
    found = {}
    for path in sorted(RESULTS.glob("gpu*.json")):
        run = result(path.stem)
        found |= {name: (figures_of(name, part), run) for name, part in run["parts"].items() if part["figures"]}
    lines = [(said, *found[name]) for name, said in GPU_PARTS.items() if name in found]
    for path in sorted(RESULTS.glob("attention.json")):
        run = result(path.stem)
        barred = [figure for figure in run["figures"] if figure["bar"] is not None]
        lines.append(("attention on the heads of Llama-8B, our Triton kernels against FlashInfer", barred, run))
    return [(said, "; ".join(map(figure_of, figures)), source(run)) for said, figures, run in lines]


def figures_of(name: str, part: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the figures of a part; of replays under traffic it counts what the gate itself said, whatever was written."""
    if name != "traffic":
        return list(part["figures"])
    return [asdict(replays(part["samples"]["host"]["gate"], figure["bar"])) for figure in part["figures"]]


def figure_of(given: dict[str, Any]) -> str:
    """Returns a figure of a GPU with its ratio and bar."""
    figure = Figure(**given)
    value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    name = figure.name.split(" decode, ")[-1]  # the row says which shape it is
    return f"{name}: {value} {figure.unit}, {ratio} (≥ {figure.bar}{missed(figure.is_met)})"


def main() -> int:
    """Rewrites the table; with ``--check``, returns 1 if it is out of date."""
    lines = [
        "| what | figure | from |",
        "|---|---|---|",
        *(f"| {what} | {figure} | {where} |" for what, figure, where in rows()),
    ]
    path = ROOT / "README.md"
    text = path.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    fresh = before + START + "\n".join(lines) + "\n" + END + after
    if "--check" in sys.argv:
        return int(fresh != text)
    path.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
