"""Memory that runs out on one rank of a group, before any operation of a step or of its drafts, or any launch of a graph (S7)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.core.request import Grammar
from hiserve.distributed.collectives import Collectives
from hiserve.engine.executor import Executor
from hiserve.engine.oom_recovery import StepBackoff
from hiserve.engine.rank import Follower
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.dialogues import trained
from tests.helpers.rank_threads import rank_threads
from tests.helpers.recorded import RecordedGraph
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

GROUP: dict[str, Any] = (
    SMALL_MODEL | pool(16) | {"tp": 2, "host_cache_gib": 0, "spec": trained("eagle3", small_model()), "spec_steps": 2}
)
PROMPT = [*range(50, 60), *range(3000, 3010)]  # tokens of both ranks
FREE = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
BOUND = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, grammar=Grammar.of("regex", "[a-z ]{40,60}"))
STRIDE, FEW = 131, 337  # operations between two faults; neither divides those of a layer
MAX_LAUNCHES = 8  # of graphs: those of the prompts, and of a step or more after them
WHOLE = ("verify", "decode")


class Counting(TorchDispatchMode):
    """Calls back before each operation of torch in this thread."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self._tick = tick

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if "c10d" not in str(function):  # an exchange that has begun does not fail here: it is in torch's hands
            self._tick()
        return function(*arguments, **named or {})


def _undisturbed(exchange: Callable[..., None]) -> Callable[..., None]:
    """Lets an exchange that has begun end: gloo copies its result in a thread that inherits the counting."""

    def wrapped(*arguments: Any) -> None:
        with _disable_current_modes():
            exchange(*arguments)

    return wrapped


class Shortage:
    """Memory runs out once: on one rank, in its ``step``-th step from now, before the operation ``launch``."""

    def __init__(self, patch: pytest.MonkeyPatch, who: int, step: int, launch: int) -> None:
        self.has_failed = False
        self._who, self._step, self._left = who, step, launch
        self._num_begun = 0
        for name in ("_all_reduce", "_all_gather"):
            patch.setattr(Collectives, name, _undisturbed(getattr(Collectives, name)))
        for name in ("_run", "_launch_draw", "_propose"):
            patch.setattr(Executor, name, self._counted(getattr(Executor, name), begins=name == "_run"))

    def _counted(self, method: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def wrapped(executor: Executor, *arguments: Any) -> Any:
            if int(isinstance(executor._group, Follower)) != self._who:
                return method(executor, *arguments)
            assert any(isinstance(each, BatchPlan) for each in arguments)
            self._num_begun += begins
            if self._num_begun != self._step or self.has_failed:
                return method(executor, *arguments)
            with Counting(self._tick):
                return method(executor, *arguments)

        return wrapped

    def _tick(self) -> None:
        self._left -= 1
        if self._left < 0 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("who", "step", "tokens", "stride"),
    some(product((0, 1), (1, 2), ("free", "bound"), (STRIDE, FEW)), (0, 2, "free", FEW), (1, 2, "free", FEW)),
)
def test_memory_that_runs_out_anywhere_on_a_rank_costs_one_step(
    who: int, step: int, tokens: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 computes the prompt and drafts, step 2 verifies them. Nobody waits for an exchange, and the tokens stay the same."""
    check_shortages(GROUP, who, step, FREE if tokens == "free" else BOUND, stride, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize(("who", "step"), [*product((0, 1), (1, 2))])
def test_memory_that_runs_out_between_sums_of_streams_costs_one_step(
    who: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of DeepSeek-V4 and its MTP head, whose exchanges are others."""
    add_stream_head(save_compressed(tmp_path, vocab_size=4096))
    group = GROUP | {"model": str(tmp_path), "spec": "mtp"}
    check_shortages(group, who, step, FREE, 3 * FEW, monkeypatch)


def check_shortages(
    group: dict[str, Any],
    who: int,
    step: int,
    sampling: SamplingParams,
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory runs out once in each of several replies, ``stride`` operations later each time, until a step has no more."""
    monkeypatch.setattr(StepBackoff, "shrink", lambda *_, **__: True)  # all steps have their sizes
    with LLM(**group | {"tp": 1}) as llm:
        expected = llm.generate([PROMPT], [sampling])[0].outputs[0].token_ids
    num_failed, has_failed = 0, True
    with rank_threads(), LLM(**group | {"disable_prefix_cache": True}) as llm:
        while has_failed:
            with pytest.MonkeyPatch.context() as patch:
                shortage = Shortage(patch, who, step, stride * num_failed)
                assert llm.generate([PROMPT], [sampling])[0].outputs[0].token_ids == expected
            has_failed = shortage.has_failed
            num_failed += has_failed
            assert sum(engine_of(llm).stats().step_faults.values()) == num_failed
    assert num_failed > 1


class FailingReplays:
    """Memory runs out once: on one rank, at the ``launch``-th replay of a graph from the time that it is counted."""

    def __init__(self, patch: pytest.MonkeyPatch, who: int, launch: int) -> None:
        self.has_failed = False
        replay, left = RecordedGraph.replay, launch

        def counted(graph: RecordedGraph) -> None:
            nonlocal left
            if threading.current_thread().name.startswith("rank-") == bool(who) and not self.has_failed:
                left -= 1
                if left < 0:
                    self.has_failed = True
                    raise RuntimeError("CUDA error: out of memory")
            replay(graph)

        patch.setattr(RecordedGraph, "replay", counted)


@pytest.mark.parametrize(
    ("who", "num_prompts", "spec", "stride"),
    some(product((0, 1), (1, 3), ("eagle3", "mtp", "off"), (1, 3)), (0, 1, "off", 3), (1, 3, "eagle3", 3)),
)
def test_memory_that_runs_out_at_any_launch_of_a_graph_costs_one_step(
    who: int, num_prompts: int, spec: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is a graph up to the last attention, three are pieces; the steps after them are whole graphs, drafts included."""
    drafts: dict[str, Any] = (
        {"spec": trained(spec, small_model()), "spec_steps": 2} if spec != "off" else {"spec": "off"}
    )
    settings = GROUP | drafts | {"disable_prefix_cache": True}
    prompts, sampling = [PROMPT[index:] for index in range(num_prompts)], [FREE] * num_prompts
    with LLM(**settings | {"tp": 1}) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]
    monkeypatch.setattr(StepBackoff, "shrink", lambda *_, **__: True)  # all steps have their sizes
    allow_recording(monkeypatch)
    with rank_threads(), LLM(**settings | {"graphs": "all", "kv_canary": False}) as llm:
        for launch in range(0, MAX_LAUNCHES, stride):
            with pytest.MonkeyPatch.context() as patch:
                failing = FailingReplays(patch, who, launch)
                got = [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]
            assert got == expected and failing.has_failed, f"launch {launch}"
        stats = engine_of(llm).stats()
    assert sum(stats.step_faults.values()) == len(range(0, MAX_LAUNCHES, stride))
    assert stats.graph_gate["replay"].keys() >= {"mixed" if num_prompts == 1 else "piecewise", WHOLE[spec == "off"]}
