"""What tests on CUDA share: engines with graphs, what the gate said, garbage in whatever nobody should read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hiserve.core.forward import ForwardInputs
from hiserve.core.request import SamplingParams
from hiserve.engine.executor import Executor
from hiserve.runners.capture import Capture
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.graph import GraphRunner
from hiserve.runners.mixed import MixedRunner
from hiserve.runners.piecewise import PiecewiseRunner
from hiserve.runners.step_output import LogitsHead
from tests.helpers.attention import NO_PAGE
from tests.helpers.models import Engine
from tests.helpers.plans import GREEDY, HandPlanner

DEVICE = "cuda"
PAGE, NUM_PAGES, MAX_LEN, MAX_ROWS = 16, 600, 512, 40
BUCKETS = (1, 2, 4, 8, 16, 32, 40)
LOGITS = (1, 2, 4)  # steps have more, too
TOKEN_BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=9)
FREE = SamplingParams(temperature=0.8, seed=9)
# Bytes; large and small ones have pools of their own.
_GAPS = (1 << 24, (1 << 20) + 512, 1 << 20, 1 << 16, 1 << 12, 512)


def wait_for_stream() -> None:
    """Waits for what the test itself has launched, if on a GPU: the executor has a stream of its own."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


# --- engines ----------------------------------------------------------------------------------------------


def graph_engine(
    folder: Path, graphs: str, dtype: str = "float32", *, attention: str = "triton", **options: Any
) -> Engine:
    sizes = {"num_pages": NUM_PAGES, "max_len": MAX_LEN, "max_rows": MAX_ROWS, "max_batched_tokens": TOKEN_BUCKETS[-1]}
    return Engine(folder, dtype=dtype, device=DEVICE, attention=attention, graphs=graphs, **sizes | options)


def with_graphs(
    subject: Engine,
    buckets: tuple[int, ...],
    *,
    width: int = 1,
    model: Any = None,
    max_len: int | None = None,
    capture: Any = None,
) -> GraphRunner:
    """Gives an engine without graphs those of whole steps, captured as the test wants it; returns their runner.

    Args:
        subject: Its executor is replaced.
        buckets: Rows of each graph.
        width: Tokens of each row.
        model: Stands in for the engine's.
        max_len: Longest row of a replay; None is the longest there is.
        capture: Stands in for one on its device.
    """
    runner = GraphRunner(
        model or subject.model,
        subject.pool.layers("kv"),
        subject.attention,
        subject.rows,
        capture or Capture(subject.rows.device),
        width=width,
        max_len=max_len or subject.rows.max_len,
        buckets=buckets,
    )
    _capture(subject, full={width: runner})
    return runner


def with_pieces(
    subject: Engine, buckets: tuple[int, ...], *, model: Any = None, capture: Any = None
) -> PiecewiseRunner:
    """Likewise those of what lies between attentions; ``buckets`` are tokens."""
    runner = PiecewiseRunner(
        model or subject.model,
        subject.pool.layers("kv"),
        subject.attention,
        subject.shape,
        capture or Capture(subject.rows.device),
        buckets=buckets,
        head=LogitsHead(model or subject.model, LOGITS),
    )
    _capture(subject, piecewise=runner)
    return runner


def with_mixed(
    subject: Engine, buckets: tuple[int, ...], *, max_width: int = 1, model: Any = None, capture: Any = None
) -> MixedRunner:
    """Likewise those of rows that decode beside a few prompts; ``buckets`` are tokens."""
    ragged = subject.attention.ragged()
    assert ragged is not None
    runner = MixedRunner(
        model or subject.model,
        subject.pool.layers("kv"),
        ragged,
        subject.shape,
        subject.rows,
        capture or Capture(subject.rows.device),
        buckets=buckets,
        max_width=max_width,
        max_len=subject.rows.max_len,
        head=LogitsHead(model or subject.model, LOGITS),
    )
    _capture(subject, mixed=runner)
    return runner


def _capture(subject: Engine, **runners: Any) -> None:
    subject.runners = Dispatch(subject.rows, subject.runner, **runners)
    subject.runners.capture()
    subject.executor.close()
    subject.executor = Executor(subject.runners, subject.rows)


# --- steps ------------------------------------------------------------------------------------------------


def prompts_of(lengths: Sequence[int], seed: int = 0, vocab: int = 4096) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        row: torch.randint(7, vocab, (length,), generator=generator).tolist()
        for row, length in enumerate(lengths, start=1)
    }


def generate(
    subject: Engine,
    prompts: Mapping[int, list[int]],
    num_new: int,
    sampling: SamplingParams = GREEDY,
    chunk: int = 100,
) -> dict[int, list[int]]:
    """Chunked prefill of two rows at a time, then decoding with all; the next call admits over these rows."""
    planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=1)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    plans = []
    while left := {row: count for row, prompt in prompts.items() if (count := len(prompt) - planner.computed[row]) > 0}:
        plans.append(planner.step({row: min(chunk, count) for row, count in list(left.items())[:2]}))
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(num_new - 1)]
    return run_all(subject, plans)


def run_all(subject: Engine, plans: Sequence[Any]) -> dict[int, list[int]]:
    """Submits all plans before the first result is read; returns the tokens of each row."""
    flying = [(plan, subject.executor.submit(plan)) for plan in plans]
    out: dict[int, list[int]] = {}
    for plan, future in flying:
        result = future.result()
        assert result.faults.size == 0
        for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
            out.setdefault(row, []).append(token)
    return out


def decisions(subject: Any) -> dict[str, int]:
    """Counts of an executor, or of an engine that has one."""
    executor = getattr(subject, "executor", subject)
    counts = executor.gate_counts()
    return {f"{action}/{reason}": count for action, reasons in counts.items() for reason, count in reasons.items()}


def news(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Returns the decisions that came since."""
    return {
        decision: count - before.get(decision, 0) for decision, count in now.items() if count > before.get(decision, 0)
    }


# --- garbage ----------------------------------------------------------------------------------------------


class Poisoned:
    """A runner that finds garbage, before each replay, in all that its graphs or it should write first.

    Args:
        runner: Replays.
        spoil: Writes the garbage, for a bucket of the runner.
    """

    def __init__(self, runner: Any, spoil: Callable[[Any, int], None]) -> None:
        self._runner = runner
        self._spoil = spoil
        self.num_replays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: Any, bucket: int) -> Any:
        self._spoil(self._runner, bucket)
        self.num_replays += 1
        return self._runner.run(step, bucket)

    def forward(self, plan: Any, bucket: int, drawing: Any) -> Any:
        self._spoil(self._runner, bucket)
        self.num_replays += 1
        return self._runner.forward(plan, bucket, drawing)


def _spoil_whole(runner: Any, bucket: int) -> None:
    captured = runner._captured[bucket]
    forward = captured.inputs.forward
    written = (forward.input_ids, forward.positions, forward.slots, forward.kv_lens, forward.page_table)
    for ints in (captured.varying, *written, *(words for _, words in captured.draws.values())):
        ints.fill_(NO_PAGE)
    captured.inputs.legal.fill_(True)
    captured.logits.fill_(torch.nan)
    for kv in runner._layers:
        for plane in (kv.k, kv.v):
            plane[:PAGE].fill_(torch.nan)  # the sink


def _spoil_pieces(runner: Any, bucket: int) -> None:
    """Padding tokens are any tokens."""
    captured, split = runner._captured[bucket], runner._split
    for floats in (split.q, split.k, split.v, split.out, captured.residual):
        floats.fill_(torch.nan)
    _spoil_tokens(captured.inputs)


def _spoil_mixed(runner: Any, bucket: int) -> None:
    """Likewise; places that a step leaves empty keep their first page."""
    static = runner._static.inputs
    for floats in (runner._out, *runner._captured[bucket].reached):
        floats.fill_(torch.nan)
    _spoil_tokens(static)
    for ints in (static.token_rows, static.qo_indptr, static.kv_lens, static.page_table[:, 1:]):
        ints.fill_(NO_PAGE)


def _spoil_tokens(static: ForwardInputs) -> None:
    static.input_ids.fill_(11)
    static.positions.fill_(MAX_LEN - 1)
    static.slots.fill_(NO_PAGE)


def poison(subject: Engine) -> list[Any]:
    """Puts garbage into what nobody has written, now and before each replay from now on; returns the runners."""
    subject.pool.storage("kv").fill_(torch.nan)
    wait_for_stream()
    runners: Any = subject.runners
    runners._full = {width: Poisoned(runner, _spoil_whole) for width, runner in runners._full.items()}
    poisoned = list(runners._full.values())
    if runners._piecewise is not None:
        runners._piecewise = Poisoned(runners._piecewise, _spoil_pieces)
        poisoned.append(runners._piecewise)
    if runners._mixed is not None:
        runners._mixed = Poisoned(runners._mixed, _spoil_mixed)
        poisoned.append(runners._mixed)
    return poisoned


def fill_freed_memory(subject: Engine) -> None:
    """Writes NaN into all memory of torch's that nobody holds: whoever still reads it is found out.

    Freed memory belongs to the stream that it was taken on, so each of them takes it again.
    """
    gc.collect()
    torch.cuda.empty_cache()
    executor: Any = subject.executor
    runners: Any = subject.runners
    captures = {id(each._capture): each._capture for each in runners._captured}
    streams = [torch.cuda.current_stream(), executor._stream, *(each._stream for each in captures.values())]
    for stream in streams:
        with torch.cuda.stream(stream):
            _fill_gaps()
            stream.synchronize()


def _fill_gaps() -> None:
    held = []
    for size in _GAPS:
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:  # until it has to ask for more
            held.append(torch.full((size // 4,), torch.nan, device=DEVICE))
