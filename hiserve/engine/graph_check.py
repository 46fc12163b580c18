"""Checks steps of every kind and their drafts, eager and replayed: decision, results, device syncs, allocations.

``python -m hiserve.engine.graph_check`` reads ``Settings`` as JSON and writes a ``GraphReport``.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from hiserve.cache.storage.device import DevicePool
from hiserve.config.settings import Settings
from hiserve.core.forward import LayerKV
from hiserve.core.plan import BatchPlan, Int32Array, RowAdmit, StepResult, TableWrites
from hiserve.core.request import SamplingParams
from hiserve.engine.executor import Executor
from hiserve.engine.runner_factory import make_runners, open_proposer
from hiserve.ipc.messages import GateCounts, GraphReport, StepCheck
from hiserve.kernels.row_codecs import load_heads
from hiserve.models.builtin_shapes import read_model
from hiserve.models.decoder import attention_shape
from hiserve.models.draft_config import DraftConfig, page_groups, read_draft
from hiserve.models.draft_heads import DraftHead, load_draft
from hiserve.models.loading import AnyDecoder, load_decoder
from hiserve.models.model_config import ModelConfig
from hiserve.runners.device_rows import DeviceRows

PROMPT_LEN, WIDTH, CHUNK_LEN, MAX_LEN = 16, 4, 61, 128
ROWS, LATE_ROW = (1, 2, 3, 4), 5
NUM_WARM, NUM_STEADY = 2, 8
MAX_DIFFERENCE = 0.05  # of the largest value: graphs may add in another order, a wrong result differs by its own size


class CheckedRow(NamedTuple):
    """One row of a step: tokens computed before it, tokens known, drafts after these."""

    computed: int
    known: int
    num_draft: int = 0

    @property
    def num_new(self) -> int:
        """Tokens to compute."""
        return self.known - self.computed + self.num_draft


DECODING = CheckedRow(PROMPT_LEN, PROMPT_LEN + 1)
# Batches that are exactly as large as a graph, so that eager steps compute the same shapes.
STEPS: dict[str, dict[int, CheckedRow]] = {
    "prefill": dict.fromkeys(ROWS, CheckedRow(0, PROMPT_LEN)),
    "decode": dict.fromkeys(ROWS, DECODING),
    "verify": dict.fromkeys(ROWS, DECODING._replace(num_draft=WIDTH - 1)),
    "mixed": dict.fromkeys(ROWS[:-1], DECODING) | {LATE_ROW: CheckedRow(0, CHUNK_LEN)},
}
GRAPHS = {"prefill": "piecewise", "decode": "decode", "verify": "verify", "mixed": "mixed"}
WHOLE = ("decode", "verify")
_NUM_ALLOCATED, _NUM_FROM_DRIVER = "allocation.all.allocated", "num_device_alloc"  # counts of torch's allocator


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model, and its draft head or model, if there is one."""

    shape: ModelConfig
    model: AnyDecoder
    draft: DraftConfig | None
    head: DraftHead | None


def load(settings: Settings) -> LoadedModel:
    """Reads the weights.

    Raises:
        HiserveError: The model or its drafts cannot be used.
    """
    folder, shape = read_model(settings.model)
    draft = read_draft(settings, folder, shape)
    of_model = settings.model
    loading: dict[str, Any] = {"dtype": of_model.dtype, "device": of_model.device, "load_format": of_model.load_format}
    aux_layers = () if draft is None else draft.aux_layers
    model = load_decoder(folder, shape, max_len=MAX_LEN, aux_layers=aux_layers, **loading)
    return LoadedModel(
        shape, model, draft, None if draft is None else load_draft(draft, model, max_len=MAX_LEN, **loading)
    )


def check_graphs(settings: Settings) -> GraphReport:
    """Loads the model and checks steps of every kind, eager ones everywhere and graphs on CUDA.

    Raises:
        HiserveError: The model, its drafts or the attention backend cannot be used.
    """
    loaded = load(settings)
    eager = CheckedEngine(settings, loaded, has_graphs=False)
    checks = [eager.check(kind, eager) for kind in STEPS]
    if settings.model.device == "cpu":
        eager.executor.close()
        return GraphReport(device="cpu", num_nodes=0, checks=checks)
    graphs = CheckedEngine(settings, loaded, has_graphs=True)
    checks += [graphs.check(kind, eager) for kind in STEPS]
    for subject in (eager, graphs):
        subject.executor.close()
    return GraphReport(device=torch.cuda.get_device_name(), num_nodes=graphs.runners.num_nodes, checks=checks)


class CheckedEngine:
    """A pool, a few rows and an executor."""

    def __init__(self, settings: Settings, loaded: LoadedModel, *, has_graphs: bool) -> None:
        dtype, page_size = settings.model.dtype, settings.cache.page_size
        self._num_pages = -(-MAX_LEN // page_size)  # of each row
        num_pages = 1 + LATE_ROW * self._num_pages
        groups = page_groups(settings, loaded.shape, loaded.draft, max_draft=WIDTH - 1)
        plan = loaded.shape.cache_plan(
            dtype, frees_windows=False, max_draft=WIDTH - 1, packs_rows=settings.cache.packs_rows
        )
        pool = DevicePool(groups, num_pages, page_size, settings.model.device, num_rows=LATE_ROW + 1)
        self._layers = pool.layers("kv")
        self._draft_layers: Sequence[LayerKV] = () if loaded.draft is None else pool.layers("draft")
        self._rows = DeviceRows(
            LATE_ROW,
            MAX_LEN,
            page_size,
            num_pages,
            settings.model.device,
            vocab_size=loaded.shape.vocab_size,
            max_draft=WIDTH - 1,
            carried=tuple(pool.carried.values()),
        )
        if self._rows.states is not None:
            # Rows start behind tokens of an earlier step: from the states that it left, or from zeros.
            self._rows.states.rehearses = True
            for memory in pool.carried.values():
                memory.rows.zero_()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(loaded.shape.vocab_size, self._rows.tokens.shape, generator=generator)
        self._prompts = prompts.to(self._rows.tokens)
        self._host_prompts: Int32Array = prompts.to(torch.int32).numpy()
        self._has_graphs = has_graphs
        self._num_propose = 0 if settings.spec.spec == "off" else WIDTH - 1
        self._drafts_eagerly = self._num_propose > 0 and loaded.draft is None  # in a few launches, which need no graph
        self.runners = make_runners(
            msgspec.structs.replace(settings.runner, graphs="all" if has_graphs else "off"),
            loaded.model,
            pool.model_layers(plan),
            self._rows,
            attention_shape(
                loaded.shape,
                dtype=getattr(torch, dtype),
                page_size=page_size,
                sinks=loaded.model.sinks,
                packs_rows=settings.cache.packs_rows,
            ),
            max_batched_tokens=len(ROWS) * PROMPT_LEN,
            widths=(1, WIDTH),
            proposer=open_proposer(settings, loaded.draft, loaded.head, pool, self._rows),
        )
        self.executor = Executor(self.runners, self._rows)
        self._step_id = 0

    def check(self, kind: str, eager: CheckedEngine) -> StepCheck:
        """Runs a step until it is warm, then once more where waiting for the device raises.

        Args:
            kind: Of ``STEPS``; those before it were checked.
            eager: Has checked the same step. Its results are the expected ones; itself is compared with nothing.
        """
        problems: list[str] = []
        parts = STEPS[kind]
        for _ in range(NUM_WARM):
            self._run(parts)
        before, num_before = self.executor.gate_counts(), _num_driver_allocations(self._rows.device)
        try:
            result = self._run(parts, is_guarded=True)
        except RuntimeError as error:
            problems.append(f"does not run: {_location(error)}")
            result = self._run(parts)
        # Counted before the comparison, which allocates too.
        allocations = float(_num_driver_allocations(self._rows.device) - num_before)
        ran = _decisions_since(before, self.executor.gate_counts())
        graphs = GRAPHS[kind]
        if graphs == "mixed" and self.runners.coverage.mixed is None:  # the backend has nothing for them
            graphs = "piecewise"
        wanted = f"replay/{graphs}" if self._has_graphs else "eager/graphs_off"
        if ran != wanted:
            problems.append(f"ran as {ran}, not as {wanted}")
        if result.faults.size or (result.counts < 1).any():
            problems.append(f"rows {result.faults} are at fault, counts are {result.counts}")
        difference = 0.0 if self is eager else self._difference(eager, parts)
        if not difference <= MAX_DIFFERENCE:
            problems.append(f"differs from the eager step by {difference:.3f} of its largest value")
        if self._has_graphs and kind in WHOLE and not self._drafts_eagerly:
            allocations += self._num_allocated(parts)
        if allocations:
            problems.append(f"allocates memory {allocations:g} times in each step")
        return StepCheck(kind=kind, ran=ran, allocations=allocations, difference=difference, problems=problems)

    def _run(self, parts: Mapping[int, CheckedRow], *, is_guarded: bool = False) -> StepResult:
        """Runs a step of rows that are admitted with it, over tokens that are always the same."""
        self._await_drafts()  # later drafts would overwrite the tokens
        self._rows.tokens.copy_(self._prompts)
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the executor has a stream of its own
        plan = self._plan(parts, is_new=True)
        if not is_guarded or self._rows.device.type == "cpu":
            return self.executor.submit(plan).result()
        with no_sync():
            return self.executor.submit(plan).result()

    def _await_drafts(self) -> None:
        """Waits for the drafts after earlier steps, by a step of no rows: results do not wait for drafts."""
        self._step_id += 1
        nothing = np.empty(0, dtype=np.int32)
        samples = np.empty(0, dtype=np.bool_)
        plan = BatchPlan(self._step_id, nothing, nothing, nothing, samples, num_scored=nothing, max_len=nothing)
        self.executor.submit(plan).result()

    def _plan(self, parts: Mapping[int, CheckedRow], *, is_new: bool) -> BatchPlan:
        """Plans a step; new rows are admitted with it, each with pages for ``MAX_LEN`` tokens."""
        self._step_id += 1
        rows = np.array(list(parts), dtype=np.int32)
        columns = np.array([(part.num_new, part.num_draft, part.computed) for part in parts.values()], dtype=np.int32)
        num_new, num_draft, computed = columns.T
        places = np.arange(rows.size * self._num_pages if is_new else 0, dtype=np.int32)
        tables, indices = rows[places // self._num_pages], places % self._num_pages
        pages = 1 + (tables - 1) * self._num_pages + indices
        return BatchPlan(
            step_id=self._step_id,
            rows=rows,
            num_new=num_new,
            num_draft=num_draft,
            samples=np.ones(rows.size, dtype=np.bool_),
            num_scored=np.zeros_like(rows),
            max_len=computed + num_new,
            num_propose=self._num_propose,
            admit=tuple(self._admit(row, part) for row, part in parts.items()) if is_new else (),
            table=TableWrites(tables, indices, pages, np.full_like(places, self._step_id)),
        )

    def _admit(self, row: int, part: CheckedRow) -> RowAdmit:
        tokens = self._host_prompts[row, : part.known]
        return RowAdmit(row, tokens, part.known, part.computed, SamplingParams(temperature=0.0, seed=0))

    def _num_allocated(self, parts: Mapping[int, CheckedRow]) -> float:
        """Runs further steps after one; returns the allocations of each."""
        parts, result = dict(parts), self._run(parts)
        before = torch.cuda.memory_stats()[_NUM_ALLOCATED]
        for _ in range(NUM_STEADY):
            for (row, part), count in zip(parts.items(), result.counts.tolist(), strict=True):
                parts[row] = part._replace(computed=part.computed + count, known=part.known + count)
            result = self.executor.submit(self._plan(parts, is_new=False)).result()
        return float((torch.cuda.memory_stats()[_NUM_ALLOCATED] - before) / NUM_STEADY)

    def _difference(self, eager: CheckedEngine, parts: Mapping[int, CheckedRow]) -> float:
        """Compares the keys and values that a step and its drafts write with those of the eager step."""
        self._await_drafts()
        eager._await_drafts()
        pairs = [(self._written(parts, self._layers), eager._written(parts, eager._layers))]
        if self._draft_layers:  # of known tokens alone: the step draws the others
            known = {row: part._replace(num_draft=0) for row, part in parts.items()}
            pairs.append((self._written(known, self._draft_layers), eager._written(known, eager._draft_layers)))
        return float(torch.stack([(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs]).max())

    def _written(self, parts: Mapping[int, CheckedRow], layers: Sequence[LayerKV]) -> Tensor:
        """Returns the keys and values of a step's tokens in some layers."""
        page_size = self._rows.page_size
        firsts = [page_size * (1 + (row - 1) * self._num_pages) + part.computed for row, part in parts.items()]
        slots = [torch.arange(part.num_new) + first for first, part in zip(firsts, parts.values(), strict=True)]
        places = torch.cat(slots).to(self._rows.device)
        return torch.stack([plane for kv in layers for plane in load_heads(kv, places, torch.float32)])


@contextmanager
def no_sync() -> Iterator[None]:
    """Within, waiting for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _num_driver_allocations(device: torch.device) -> int:
    """Returns the number of allocations by the driver."""
    return torch.cuda.memory_stats()[_NUM_FROM_DRIVER] if device.type == "cuda" else 0


def _decisions_since(before: GateCounts, now: GateCounts) -> str:
    """Returns the decisions made since, each with its reason."""
    return ", ".join(
        f"{decision}/{reason}"
        for decision, reasons in now.items()
        for reason, count in reasons.items()
        if count > before.get(decision, {}).get(reason, 0)
    )


def _location(error: RuntimeError) -> str:
    """Returns the line of the package that raised an error, and its message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "hiserve" in Path(frame.filename).parts]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].line}" if frames else "elsewhere"
    return f"{where} ({str(error).splitlines()[0]})"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # on stderr
    report = check_graphs(msgspec.json.decode(sys.stdin.buffer.read(), type=Settings))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
