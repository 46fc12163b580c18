"""Speculation on hiserve-nano widened to a large shape: it says what nano says, and costs what the shape costs."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.driving import Bench, Part
from benchmarks.gpu.figures import CycleLimits, Figure
from benchmarks.gpu.sizes import BARS, SEED, SPEC_SHAPES, SpecSizes
from benchmarks.widen import bundled_heads, widen, widen_head, write, write_head
from hiserve import LLM
from hiserve.bench.equality import Equality, EqualityChecker, are_kept, over_all
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import BatchResult, Tokens, read_prompts, run_batch
from hiserve.bench.spec_run import sampling
from hiserve.core.plan import Int32Array
from hiserve.core.usage import DraftUse
from hiserve.models.draft_config import find_draft
from hiserve.models.model_config import NANO, find_model, read_model_config

AUTO = "auto"
Replies = list[Tokens]


class Held:
    """As ``DraftController``, and always chooses the same number: an engine has the graphs of all of them."""

    times_own_drafts = False
    is_cold = False

    def __init__(self, num_draft: int) -> None:
        self._num_draft = num_draft

    def stays_cold(self, allowed: Int32Array) -> bool:
        return False

    def choose(self, allowed: Int32Array, mean_context: float) -> int:
        return self._num_draft

    def record(self, *_: Any) -> None:
        """Learns nothing."""


def measure_spec(bench: Bench) -> Part:
    """Times greedy decoding with each head, number of drafts and batch, against an engine without speculation."""
    bench.close()
    part, sizes = Part(), bench.sizes.spec
    with tempfile.TemporaryDirectory() as folder:
        part.samples["widened"] = widened(Path(folder), sizes, bench.sizes.settings)
        settings = bench.sizes.settings | sizes.settings | bench.overrides | {"model": folder}
        settings.pop("load_format", None)
        with opened(part, settings, "off") as plain:
            prompts = read_prompts(plain.settings, SweepOptions(batches=sizes.batches, prompt_length=sizes.prompt))
            runner = Runner(plain, prompts, sizes)
            for head, batches in sizes.heads.items():
                with opened(part, settings, head) as engine:
                    limits = limits_of(Path(folder), head, plain.settings.model.dtype)
                    found = {batch: runner.measure(engine, batch) for batch in batches}
                for batch, each in found.items():
                    report(part, bench, head, batch, each, limits)
                part.figures.append(same_tokens(sizes, head, [each["equality"] for each in found.values()]))
    return part


def widened(folder: Path, sizes: SpecSizes, settings: dict[str, Any]) -> dict[str, Any]:
    """Writes the widened model and its heads; returns what that took."""
    begin, device = time.perf_counter(), torch.device(settings["device"])
    wide, dtype = widen(find_model(NANO), SPEC_SHAPES[sizes.shape], SEED), getattr(torch, settings["dtype"])
    heads = bundled_heads(wide.folder)
    missing = set(sizes.heads) - set(heads)
    assert not missing, f"{sorted(missing)} did not come with hiserve-nano: put their folders into {wide.folder}"
    write(wide, dtype, device, folder)
    for kind in sizes.heads:
        write_head(wide, widen_head(wide, heads[kind]), dtype, device, folder / kind)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return {"shape": sizes.shape, "seconds": time.perf_counter() - begin, "bytes": num_bytes}


@contextmanager
def opened(part: Part, settings: dict[str, Any], spec: str) -> Iterator[LLM]:
    begin = time.perf_counter()
    with LLM(in_process=True, **(settings | {"spec": spec})) as engine:
        part.samples[f"start of {spec}"] = time.perf_counter() - begin
        yield engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def limits_of(folder: Path, head: str, dtype: str) -> CycleLimits:
    """Returns those of the wide model and of a head of it."""
    model, raw = read_model_config(folder), json.loads((folder / head / "config.json").read_text())
    draft = find_draft("mtp" if head == "mtp" else "eagle3", None, folder, model)
    return CycleLimits.of(model, draft, dtype, raw.get("draft_vocab_size", model.vocab_size))


class Runner:
    """Runs one batch after the other, on two engines in turn: one without speculation, and another."""

    def __init__(self, plain: LLM, prompts: list[Tokens], sizes: SpecSizes) -> None:
        self._plain = plain
        self._judge = EqualityChecker(plain)
        self._prompts = prompts
        self._sizes = sizes

    def measure(self, engine: LLM, batch: int) -> dict[str, Any]:
        """Returns the runs of ``off``, of each fixed number of drafts and of ``auto``, and how its tokens compare.

        The first run of each, with new prompts and kernels that are not compiled, does not count. It is
        short, but where drafts are chosen by what is learned.
        """
        sizes, modes = self._sizes, ["off", *map(str, self._sizes.steps), AUTO]
        groups, repeats = [self._prompts[:batch]], sizes.repeats
        if batch == 1:  # what one prompt gives is of that prompt
            groups, repeats = [[prompt] for prompt in self._prompts[: sizes.singles]], sizes.repeats_of_one
        runs: dict[str, list[BatchResult]] = {mode: [] for mode in modes}
        replies: dict[str, Replies] = {}
        for mode in modes:
            self._run(engine, mode, groups[0], sizes.output if mode == AUTO else sizes.warm_output)
        for _ in range(repeats):
            replies = {mode: [] for mode in modes}
            for group in groups:
                for mode in modes:
                    run, said = self._run(engine, mode, group, sizes.output)
                    runs[mode].append(run)
                    replies[mode] += said
        asked = [prompt for group in groups for prompt in group]
        judged = slice(min(len(asked), sizes.judged))
        prompts, expected = asked[judged], replies["off"][judged]
        equal = {
            mode: self._judge.compare(prompts, expected, replies[mode][judged], 0.0) for mode in modes if mode != "off"
        }
        return {
            "runs": runs,
            "equality": equal,
            "prompt": statistics.fmean(map(len, asked)),
            "prompts": len(asked),
        }

    def _run(self, engine: LLM, mode: str, prompts: list[Tokens], num_new: int) -> tuple[BatchResult, Replies]:
        params = sampling(len(prompts), 0.0, num_new)
        if mode == "off":
            return run_batch(self._plain, prompts, params)
        with held(engine, None if mode == AUTO else int(mode)):
            return run_batch(engine, prompts, params)


@contextmanager
def held(engine: Any, num_draft: int | None) -> Iterator[None]:
    """Holds the number of drafts of an engine that chooses it; None lets it choose."""
    choice = engine._backend.engine._planner._drafting
    controller = choice._controller
    assert controller is not None, "the engine chooses nothing"
    if num_draft is not None:
        choice._controller = Held(num_draft)
    yield
    choice._controller = controller


def report(part: Part, bench: Bench, head: str, batch: int, found: dict[str, Any], limits: CycleLimits) -> None:
    sizes, runs = bench.sizes.spec, found["runs"]
    rates = {mode: rate(each) for mode, each in runs.items()}
    context = found["prompt"] + sizes.output / 2
    told = {}
    for mode, each in runs.items():
        drafts = sum((run.drafts for run in each), DraftUse())
        gains = speedups(each, runs["off"])
        speedup, cost = statistics.median(gains), None
        if mode not in ("off", AUTO):
            cost = limits.cost(batch, int(mode), context, bench.ceilings)
        told[mode] = {
            "tokens_per_s": rates[mode],
            "speedup": speedup,
            "speedup_quartiles": statistics.quantiles(gains, n=4) if len(gains) > 1 else gains * 3,
            "prompts": found["prompts"],
            "drafts": drafts.shown(),
            "step_s": statistics.median(run.step_s for run in each),
            "cycle_cost": statistics.median(run.step_s for run in each)
            / statistics.median(run.step_s for run in runs["off"]),
            "least_cycle_cost": cost,
            "runs": [msgspec.to_builtins(run) for run in each],
            "equality": msgspec.to_builtins(found["equality"][mode]) if mode != "off" else None,
        }
        if batch == 1 and cost is not None and int(mode):
            assert drafts.accepted, f"{head} with {mode} drafts: none of {drafts.proposed} was accepted"
            limit = drafts.accept_length / cost
            against = f"accept length {drafts.accept_length:.2f} / cycle cost {cost:.2f}"
            name = f"{sizes.shape} {head}, batch 1, {mode} drafts, median of {found['prompts']} prompts"
            part.figures.append(Figure(name, speedup, "x", speedup / limit, BARS["speculation"], against))
    part.figures.append(adaptive(sizes, head, batch, rates))
    part.samples[f"{head}, batch {batch}"] = {"context": context, **told}


def rate(runs: Sequence[BatchResult]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)


def speedups(runs: Sequence[BatchResult], off: Sequence[BatchResult]) -> list[float]:
    """Returns what each run gives, of the run of the same prompts without speculation."""
    return [run.tokens_per_s / plain.tokens_per_s for run, plain in zip(runs, off, strict=True)]


def adaptive(sizes: SpecSizes, head: str, batch: int, rates: dict[str, float]) -> Figure:
    """Compares what chooses its drafts with the best of those that do not, an engine without a head among them."""
    fixed = {mode: rates[mode] for mode in ("off", *map(str, sizes.steps))}
    best = max(fixed, key=lambda mode: fixed[mode])
    name_of_best = "no head" if best == "off" else f"{best} drafts"
    against = f"{name_of_best}, {fixed[best]:.0f} tokens/s; {rates['off']:.0f} without speculation"
    name = f"{sizes.shape} {head}, batch {batch}, auto drafts"
    return Figure(name, rates[AUTO], "tokens/s", rates[AUTO] / fixed[best], BARS["adaptive"], against)


def same_tokens(sizes: SpecSizes, head: str, found: Sequence[dict[str, Equality]]) -> Figure:
    """Returns how many of the judged replies are the same; the ratio is 1 where the others keep the margin, else 0."""
    judged = [each for batch in found for each in batch.values()]
    replies = sum(each.num_replies for each in judged)
    same = replies - sum(each.num_differing for each in judged)
    margin = over_all(judged)
    kept = float(are_kept(judged))
    name = f"{sizes.shape} {head}, same replies"
    return Figure(name, same, f"of {replies}", kept, BARS["same tokens"], f"plain decoding, by the margin: {margin}")
