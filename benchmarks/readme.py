"""Writes ``docs/figures.md`` and the README's table from the result files: ``python benchmarks/readme.py [--check]``."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bars import against, at_least, at_most, below, planned
from benchmarks.cache import DURING_LOAD, REPLAYED
from benchmarks.gpu.figures import Figure, replays
from benchmarks.gpu.sizes import PEER, PEER_DATE
from benchmarks.record import RESULTS, ROOT, is_current, spread_text
from benchmarks.surface import surface

Found = dict[str, Any]
Entry = tuple[str, str, Found]  # a name, its figures with their bars, and the result file

PAGE = ROOT / "docs" / "figures.md"
STALE = "the code has changed since"
THEN = f"{PEER} in another run, of {PEER_DATE}"
# Parts of benchmarks.gpu, and the name of each in the page of figures. Their ratios are shares of a limit, or speed-ups.
GPU_PARTS = {
    "decode": "Llama-8B shape, decode step of rows x context; ratio: time to read weights, keys and values at a copy's rate / time",
    "prefill": f"Llama-8B shape, prompts computed at once; ratios: to the rate of a matrix product; to {THEN}",
    "long": "Llama-8B shape, one row; ratios: prompts to the rate of a matrix product; time to read weights, keys and values / time of a step",
    "peers": f"Llama-8B shape, rows x prompt -> output tokens; ratio to {THEN}",
    "chats": f"Llama-8B shape, chats: 1024 tokens in common, 512 new and 64 out a turn; ratio to {THEN}",
    "conversations": f"Llama-8B shape, device pool of 64k tokens and a host tier, 256 new and 16 out a turn; ratio to {THEN}",
    "graphs": "Llama-8B shape, decode step with graphs; ratio: time without graphs / time",
    "traffic": "Llama-8B shape, prefixes loaded from the host beside 8 decoding rows; ratio: replayed steps / steps with a graph",
    "small-decode": "Qwen3-0.6B shape, decode step of rows x context; ratio: time to read weights, keys and values / time",
    "overlap": "Qwen3-0.6B shape, decode step planned ahead; ratio: time with --overlap 0 / time",
    "http": "Llama-8B shape over HTTP; ratio: throughput over HTTP / in one process",
    "crowd-http": "Llama-8B shape over HTTP, a row for each stream; ratio: throughput over HTTP / in one process",
    "small-http": "Qwen3-0.6B shape over HTTP; ratio: throughput over HTTP / in one process",
    "few-bits": "Llama-8B shape with weights in 8 and 4 bits; ratio: time with weights in 16 bits / time",
    "spec": "hiserve-nano and its draft heads widened to the Llama-8B shape; ratios: speed-up over plain decoding / (accept length / "
    "least cost of a cycle); throughput of adaptive drafts / best fixed number; equal replies",
}
# Parts of benchmarks.hybrid.
HYBRID_PARTS = {
    "latent_decode": "kernel of absorbed queries, rows x context",
    "compressed": "kernels of compressed attention and of streams, widths of DeepSeek-V4-Flash, rows x tokens",
    "delta": "kernels of the gated delta rule, heads of Qwen3.5-35B-A3B, rows x tokens",
    "v3-like": "DeepSeek-V3 shape of six layers, decode step of rows x context, and prompts",
    "v3.2-like": "DeepSeek-V3.2 shape of six layers, decode step of rows x context, and prompts",
    "glm-4.7-flash": "GLM-4.7-Flash shape, decode step of rows x context, and prompts",
    "gpt-oss-20b": "gpt-oss-20b shape, decode step of rows x context, and prompts",
    "gpt-oss-20b-mxfp4": "gpt-oss-20b shape with packed experts, decode step of rows x context, and prompts",
    "gemma-3-27b": "Gemma-3-27B shape, decode step of rows x context, and prompts",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B shape, decode step of rows x context, and prompts",
    "v4-flash-like": "DeepSeek-V4-Flash shape of six layers, decode step of rows x context, and prompts",
    "v4-flash-like-fp4": "DeepSeek-V4-Flash shape of six layers with packed experts, decode step of rows x context, and prompts",
}
# Rows of the README's table: figures of benchmarks.gpu, by part, whose ratio is to a limit of the hardware, and what each limit is.
LIMITED = {"decode": "bytes at a copy's rate", "prefill": "products at a matrix product's rate"}
PAGE_HEAD = """# Figures

This page is written by `python benchmarks/readme.py` from `benchmarks/results/`, which holds every raw sample. `make bench` repeats the
CPU figures, `make bench-gpu OUT=FOLDER` the GPU figures. `[a – b]` is the spread of the samples, `(≤ x)` or `(≥ x)` the bar of a
figure. A figure is marked as older than the code when the code that it measures has changed since its commit.
[State](state.md) gives the known reasons of missed bars.

"""
START, END = "<!-- figures: benchmarks/readme.py -->\n", "<!-- end of figures -->\n"


def result(name: str) -> Found:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def source(found: Found) -> str:
    """Says where a figure comes from, and whether the code that it measures has changed since."""
    at = f" at {found['commit']}" if "commit" in found else ""
    changed = "" if is_current(found) else f"; **{STALE}**"
    return f"{found['hardware']}; `{found['command']}`, {found['date'][:10]}{at}{changed}"


def cpu() -> Iterator[Entry]:
    """Yields the entries of ``make bench`` but for heads and recovery."""
    turn, offline, serving, radix, planner = map(result, ("second_turn", "offline", "serving", "radix", "planner"))
    ratios = [each["second_turn_ms"] / each["second_turn_uncached_ms"] for each in turn["rounds"]]
    yield (
        "time to first token of the second turn of a 2,000-token conversation: cached / uncached",
        f"{turn['second_turn_ms']:.0f} ms / {turn['second_turn_uncached_ms']:.0f} ms = {below(ratios, '.2f', '', turn['bar'])}",
        turn,
    )
    rates = offline["samples_tokens_per_s"]
    yield (
        "offline, 8 rows, 256 → 128 tokens, float32: speed-up over transformers one by one, and batched",
        " and ".join(against(rates["hiserve"], rates[name], limit) for name, limit in offline["bars"].items()),
        offline,
    )
    bars, rates = serving["bars"], serving["samples"]
    memory_mb = serving.get("rss_mb", [serving["found"]["api_rss_mb"]])
    yield (
        "throughput over HTTP at 32 streams / offline; time from start to ready; memory of the API process",
        f"{against(rates['http'], rates['offline'], bars['http_over_offline'])}; "
        f"{below(serving['starts_s'], '.1f', ' s', bars['ready_s'])}; {below(memory_mb, '.0f', ' MB', bars['api_rss_mb'])}",
        serving,
    )
    match = radix["results"][0]
    yield (
        "match + lock + release of 100k tokens over 300 nodes; ratio to memcmp",
        f"{spread_text(match['samples']['match_lock_release_us'], '.0f', ' µs')} = {match['ratio_to_memcmp']:.0f} × "
        f"{at_most(match['ratio_to_memcmp'], match['bar_ratio'], ' ×')}",
        radix,
    )
    plans = planned([case for case in planner["results"] if "rows" in case], "plan_and_commit_us")
    nodes = planned([case for case in planner["results"] if "nodes" in case][::3], "publish_and_store_us")
    step = "plan + commit of a step, 32 and 256 decoding rows,"
    yield f"{step} device tier only", ", ".join(plans[:2]), planner
    yield f"{step} every page written through to the host", ", ".join(plans[2:]), planner
    yield "publication and backup of a node of 1 and 64 pages, in the planning thread", ", ".join(nodes), planner
    page = result("dashboard")
    yield (
        f"a dashboard that reads once a second, {page['rows']} rows: CPU time of the API process a second",
        below(page["ms_of_a_reading"], ".1f", " ms", 1e3 * page["bar"]),
        page,
    )


def heads() -> Iterator[Entry]:
    """Yields the entries of hiserve-nano's draft heads."""
    accepted, speed = result("nano_acceptance"), result("nano_spec")
    lengths, differences = [], []
    for kind in ("eagle3", "mtp"):
        found = accepted[kind]
        length = found["served"]["dialogues"]["served"]["accept_length"]
        drawn, temperature = found["drawn"]["coupled"]["accept_length"], found["drawn"]["temperature"]
        told = f"{length:.2f} {at_least(length, accepted['bars'][kind])}"
        lengths.append(f"{told}, {drawn:.2f} at temperature {temperature}")
        differences += [abs(each["difference"]) for each in found["served"].values()]
    shares = f"{max(differences):.1%} {at_most(100 * max(differences), 100 * accepted['max_difference'], '%')}"
    yield (
        "hiserve-nano in held-out dialogues, accept length as `usage` defines it: EAGLE-3 with three drafts, MTP with one; "
        "largest difference between served and predicted",
        f"{'; '.join(lengths)}; {shares}",
        accepted,
    )
    speedups = []
    for kind in ("dialogue", "code"):
        took = {name: [sum(round_) for round_ in zip(*s, strict=True)] for name, s in speed[kind]["seconds"].items()}
        speedups.append(against(took["plain"], took["default"], speed["bar"]))
    yield (
        "hiserve-nano on a CPU, one stream, defaults: speed-up over `--spec off` in dialogue and code",
        " and ".join(speedups),
        speed,
    )
    replies = result("reply_drafts")
    summary, bars = replies["summary"], replies["bars"]
    gains = (at_least(summary[f"gain, depth {depth}"], bars["gain"]) for depth in (0, 1))
    yield (
        "n-gram drafts in held-out agent sessions, the replies before searched too: accepted drafts of a step, with no step and with one "
        "planned ahead, over those of the request alone",
        ", ".join(f"{summary[f'gain, depth {depth}']:.2f} × {bar}" for depth, bar in enumerate(gains)),
        replies,
    )
    yield (
        "search of 65,536 kept tokens for a row of a step, in the planning thread: alone, and of 32 rows",
        ", ".join(
            below(case["row_us"], ".1f", " µs", bars["row_us"])
            for case in replies["planning"]
            if case["rows"] in (1, 32)
        ),
        replies,
    )


def recovery() -> Iterator[Entry]:
    """Yields the entries of workers that die."""
    for path in sorted(RESULTS.glob("recovery*.json")):
        run = result(path.stem)
        bars, settings, share = run["bars"], run["settings"], run["supervision"]["share"]
        hits = [each["host_share"] for each in run["rounds"]]
        yield (
            f"{settings.get('shape', settings.get('model'))}, worker killed under {run['load']['streams']} streams: time to the first "
            "new token without loading weights; share of replayed tokens found on the host; CPU share of supervision and ledger",
            f"{below([each['without_weights_s'] for each in run['rounds']], '.1f', ' s', bars['without_weights_s'])}; "
            f"{spread_text(hits, '.2f')} {at_least(statistics.median(hits), bars['host_share'])}; "
            f"{spread_text(run.get('supervision_shares', [share]), '.2%')} "
            f"{at_most(100 * share, 100 * bars['supervision_share'], '%')}",
            run,
        )


def soak() -> Iterator[Entry]:
    """Yields the entries of servers under load for long: one under all faults, one without."""
    for path in sorted(RESULTS.glob("soak*.json")):
        run = result(path.stem)
        found = run["soak"]
        counted = Counter(fault["fault"] for fault in found["faults"])
        struck = ", ".join(f"{count} {fault}" for fault, count in sorted(counted.items())) or "no faults"
        felt_s = [fault["recovery_s"] for fault in found["faults"] if fault["recovery_s"] is not None]
        felt = "no process died or hung"
        if felt_s:
            felt = f"median {statistics.median(felt_s):.1f} s, longest {max(felt_s):.1f} s"
        grown = [(each["role"], each["mib_per_min"]) for each in found["growth"] if each["is_judged"]]
        slopes = ", ".join(f"{role} {slope:.2f}" for role, slope in grown)
        yield (
            f"hiserve-nano in float64 under load for {found['duration_s'] / 60:.0f} minutes ({struck}): violations of the "
            "oracle; time to the first new token after a process died or hung; growth of processes older than ten minutes",
            f"{found['num_violations']} {at_most(found['num_violations'], 0)}; {felt}; "
            f"{slopes} MiB a minute {at_most(max(slope for _, slope in grown), 1)}",
            run,
        )


def tiers() -> Iterator[Entry]:
    """Yields the entries of the host tier on a GPU."""
    cache, copy = result("cache"), result("copy")
    ratios = {name: ratio for part in cache["parts"].values() for name, ratio in part.get("ratios", {}).items()}
    with_bars = {name: f"{at_most(ratio, cache['bars'][name])}" for name, ratio in ratios.items()}
    longer, recompute, slower, stored = (
        f"{ratios[name]:{form}} × {with_bars[name]}"
        for name, form in (
            ("hit over the longer half", ".2f"),
            ("hit over recompute", ".2f"),
            (DURING_LOAD, ".2f"),
            ("write-through", ".3f"),
        )
    )
    yield (
        "Llama-8B shape, 16k tokens from the host + 256 new: time to first token; ratio to the longer of load and prefill; "
        "ratio to computing all tokens",
        f"{1e3 * cache['parts']['hit']['ttft_s']:.0f} ms = {longer}, {recompute}",
        cache,
    )
    yield (
        "Llama-8B shape: p99 time per token of 8 rows during a load of 16k tokens / without it; time per token with write-through / without",
        f"{slower}, {stored}",
        cache,
    )
    kept, ratio = cache["parts"]["conversations"], ratios["conversations"]
    yield (
        "Llama-8B shape: 32 conversations of 6k tokens over a device pool of 64k, input tokens/s with a host tier / without",
        f"{kept['host']['input_tokens_per_s']:.0f} / {kept['device']['input_tokens_per_s']:.0f} "
        f"= {ratio:.1f} × {at_least(ratio, cache['bars']['conversations'])}",
        cache,
    )
    words = {
        "hit over recompute": "first token with 16k tokens from the host / computing all",
        "hit over the longer half": "the same / the longer of load and prefill of the rest",
        "write-through": "time per token with write-through / without",
        DURING_LOAD: "p99 time per token of other rows during a load / without it",
        REPLAYED: "replayed steps of those with a graph, while loads run",
    }
    for path in sorted(RESULTS.glob("cache_*.json")):  # of other shapes, some with a part of the figures
        run = result(path.stem)
        bars = cache["bars"] | run["bars"]
        ratios_of = [part["ratios"] for part in run["parts"].values()]
        found = {name: each[name] for each in ratios_of for name in words if each.get(name) is not None}
        told = "; ".join(
            f"{ratio:.3f} {at_least(ratio, bars[name])}"
            if name == REPLAYED
            else f"{ratio:.3f} × {at_most(ratio, bars[name])}"
            for name, ratio in found.items()
        )
        yield f"{run['workload']['settings']['shape']} shape: {'; '.join(words[name] for name in found)}", told, run
    shares = []
    for shape, figures in copy["shapes"].items():
        offloads = figures.get("offload_anywhere") or figures["store_anywhere"]  # its name until issue 17
        load, store = figures["load_anywhere"]["of_ceiling"], offloads["of_ceiling"]
        shares.append(f"{load:.3f} and {store:.3f} {at_least(min(load, store), copy['bars'][shape])}")
    yield (
        "transfers between host and device, share of pinned-copy bandwidth: load and offload, pages of 2 MiB, of 64 KiB",
        ", ".join(shares),
        copy,
    )


def gpu() -> Iterator[Entry]:
    """Yields the parts of all runs of ``benchmarks.gpu``, of a part that ran twice the later file's; then attention."""
    found = {}
    for path in sorted(RESULTS.glob("gpu*.json")):
        run = result(path.stem)
        found |= {name: (figures_of(name, part), run) for name, part in run["parts"].items() if part["figures"]}
    for name, said in GPU_PARTS.items():
        if name in found:
            figures, run = found[name]
            yield said, "; ".join(map(figure_of, figures)), run
    for path in RESULTS.glob("attention.json"):
        run = result(path.stem)
        barred = [figure for figure in run["figures"] if figure["bar"] is not None]
        said = "attention with the heads of Llama-8B: time of FlashInfer / time of the Triton kernels"
        yield said, "; ".join(map(figure_of, barred)), run
    for path in sorted(RESULTS.glob("hybrid*.json")):  # a part a file, or more
        run = result(path.stem)
        for name, part in run["parts"].items():
            barred = [figure for figure in part["figures"] if figure["bar"] is not None]
            said = f"{HYBRID_PARTS[name]}; ratio: time at this run's copy rate, or rate of a matrix product, / time"
            yield said, "; ".join(map(figure_of, barred)), run


def quantized() -> Iterator[Entry]:
    """Yields the entries of keys, values and weights in fewer bits."""
    run = result("kv_dtype")
    barred = [figure for part in run["parts"].values() for figure in part["figures"] if figure["bar"] is not None]
    yield "Llama-8B shape, `--kv-dtype fp8`; ratio to bfloat16", "; ".join(map(figure_of, barred)), run
    run = result("quantized")
    for name, ratios in run["ratios"].items():
        if name != "off":
            bars = run["bars"][name]
            told = {case: at_least(ratio, bars[case]) if case in bars else "" for case, ratio in ratios.items()}
            said = [f"{case}: {ratio:.2f} × {told[case]}".rstrip() for case, ratio in ratios.items()]
            yield (
                f"Llama-8B shape, `--quantize {name}`: speed of rows that decode and of prompts / in bfloat16",
                "; ".join(said),
                run,
            )


def exact() -> Iterator[Entry]:
    """Yields the entry of sums in one order."""
    run = result("exact")
    said = [f"{case}: {ratio:.2f} × {at_most(ratio, run['bars'][case])}" for case, ratio in run["ratios"].items()]
    yield (
        "Llama-8B shape, `--exact`: time of steps of rows x context, and of prompts / by default, Triton's attention",
        "; ".join(said),
        run,
    )


def sweeps() -> Iterator[Entry]:
    """Yields the entries of ``hiserve bench spec --sweep``: drafts whose number is chosen step by step."""
    for path in sorted(RESULTS.glob("spec_sweep*.json")):
        run = result(path.stem)
        chosen = [case for case in run["cases"] if case["steps"] == "auto"]
        ratios = [case["figures"]["speedup"] for case in chosen if case["figures"]["bar"] < 1]
        fast = [case["figures"] for case in chosen if case["figures"]["bar"] > 1]
        yield (
            f"{run['config']['model']['shape']} shape, rehearsed drafts at the cost of its MTP head, their number chosen step by "
            "step: tokens a second over those without drafts, the least; with one request and 0.7 of the drafts right",
            f"{min(ratios):.2f} {at_least(min(ratios), 0.97)} of {len(ratios)}; "
            + ", ".join(f"{each['speedup']:.2f} {at_least(each['speedup'], each['bar'])}" for each in fast),
            run,
        )


def figures_of(name: str, part: Found) -> list[Found]:
    """Returns the figures of a part; of replays under traffic it counts the gate's own reasons, not the written ratio."""
    if name != "traffic":
        return list(part["figures"])
    return [asdict(replays(part["samples"]["host"]["gate"], figure["bar"])) for figure in part["figures"]]


def figure_of(given: Found) -> str:
    figure = Figure(**given)
    value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    name = figure.name.split(" decode, ")[-1]  # the row says which shape it is
    return f"{name}: {value} {figure.unit}, {ratio} (≥ {figure.bar:.3g}{'' if figure.is_met else ': missed'})"


def limited_figures(run: Found) -> list[tuple[str, Found]]:
    """Returns figures with the name of a limit of the hardware."""
    return [
        (limit, figure)
        for part, limit in LIMITED.items()
        for figure in run["parts"][part]["figures"]
        if PEER not in figure["against"]
    ]


def limit_rows() -> list[str]:
    """Returns the README's table: steps and prompts of hiserve beside what the hardware allows, measured in the same run."""
    run = result("gpu")
    lines = ["| workload | hiserve | of the hardware's limit | the limit |", "|---|---:|---:|---|"]
    for limit, figure in limited_figures(run):
        what, sizes = figure["name"].removeprefix("llama-8b ").split(", ")
        count, size = sizes.split(" x ")
        value = f"{figure['value']:,.0f}" if figure["value"] >= 100 else f"{figure['value']:.2f}"
        lines.append(
            f"| {what}, {count} rows of {int(size):,} tokens | {value} {figure['unit']} | {figure['ratio']:.2f} | {limit} |"
        )
    hardware = run["hardware"].split(", ")[-1]
    older = "" if is_current(run) else f" {STALE.capitalize()}."
    return [
        *lines,
        "",
        f"Llama-8B shape, bfloat16, {hardware}; the rates are those of the same run; `{run['command']}`.{older}",
    ]


def rows() -> list[Entry]:
    return [
        each
        for part in (cpu, heads, partial(surface, result), recovery, soak, tiers, gpu, quantized, exact, sweeps)
        for each in part()
    ]


def figures_page() -> str:
    """Returns ``docs/figures.md``: a summary, then the entries."""
    entries = rows()
    old = sum(not is_current(run) for _, _, run in entries)
    bars = sum(figure.count("≤") + figure.count("≥") for _, figure, _ in entries)
    misses = sum(figure.count(": missed") for _, figure, _ in entries)
    parts = [PAGE_HEAD, f"{bars} bars, {misses} missed. {old} of {len(entries)} entries are older than the code.\n"]
    for group, is_on_gpu in (("On a CPU", False), ("On a GPU", True)):
        parts.append(f"\n## {group}\n")
        for name, figure, run in (entry for entry in entries if ("NVIDIA" in entry[2]["hardware"]) == is_on_gpu):
            title = name if name.startswith("hiserve") else name[0].upper() + name[1:]
            parts.append(f"\n**{title}**\n\n")
            parts += [f"- {each}\n" for each in figure.split("; ")]
            parts.append(f"- Source: {source(run)}\n")
    return "".join(parts)


def main() -> int:
    """Rewrites the page and the table; with ``--check``, returns 1 if one of them is out of date."""
    path = ROOT / "README.md"
    before, rest = path.read_text().split(START)
    _, after = rest.split(END)
    fresh = {path: before + START + "\n".join(limit_rows()) + "\n" + END + after, PAGE: figures_page()}
    if "--check" in sys.argv:
        return int(any(not each.is_file() or each.read_text() != text for each, text in fresh.items()))
    for each, text in fresh.items():
        each.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
