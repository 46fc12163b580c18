"""Kernels are compiled side by side before any is launched; of those that graphs hold, none is left."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from hiserve import LLM, SamplingParams, kernels
from hiserve.attention import backends
from hiserve.core import resolve
from hiserve.engine import runner_factory
from hiserve.engine.startup import compile_steps, plan_without_pages, profile_steps, warm_up_steps
from hiserve.kernels import ahead, draft_ops, fused, ops, step_ops
from hiserve.layers import GatedMLP, StackedExperts
from hiserve.models import decoder
from hiserve.models.builtin_shapes import SHAPES
from hiserve.runners.gate import Action, Decision, Reason
from hiserve.sampling.params import Drawing
from tests.helpers.cache_paths import SETTINGS
from tests.helpers.drafted import save_heads
from tests.helpers.recorded import RecordedCapture
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

pytestmark = pytest.mark.filterwarnings(
    "ignore:TRITON_DEFAULT_FP_FUSION"
)  # told by the Triton of torch 2.13 on the CPU

SEED = 7


class Toolchain:
    """Stands in for Triton's compiler and for a GPU: notes what is compiled and what is launched.

    Attributes:
        compiled: Kernels, with what they were compiled for.
        threads: That compiled them.
        launched: Names of kernels.
        failing: Names of kernels that cannot be compiled.
        is_warm: Whether a cache of the machine has them all.
    """

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.launched: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.is_warm = False

    def compile(self, src: Any, target: Any, options: Any, **_: Any) -> Any:
        self.compiled.append((src.name, f"{src.signature} {src.constants} {src.attrs} {options}"))
        self.threads.add(threading.get_ident())
        if src.name in self.failing:
            raise RuntimeError(f"{src.name} cannot be compiled")
        if knobs.compilation.listener is not None:
            told: Any = {"metadata": {}, "metadata_group": {}, "times": None}
            knobs.compilation.listener(src=src, cache_hit=self.is_warm, **told)

        def run(*_: Any) -> None:
            self.launched[src.name] += 1

        return SimpleNamespace(launch_metadata=lambda *_: None, run=run, function=None, packed_metadata=None)


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """Lets tensors on the CPU have kernels, which compute nothing."""
    made = Toolchain()
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr("triton.compiler.compile", made.compile)
    for each in pkgutil.iter_modules(kernels.__path__):
        for kernel in vars(importlib.import_module(f"{kernels.__name__}.{each.name}")).values():
            if isinstance(kernel, JITFunction):
                monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    for module in (ops, step_ops, draft_ops):
        monkeypatch.setitem(module._MODULES, "cpu", module._MODULES["cuda"])
    on_cpu = dataclasses.replace(backends._BACKENDS["triton"], devices=("cpu",))
    monkeypatch.setitem(backends._BACKENDS, "triton", on_cpu)
    return made


class NoMeter:
    """Measures nothing."""

    def begin(self) -> None:
        """As ``Meter``."""

    def peak_bytes(self) -> int:
        return 0


def norm(num_rows: int = 4) -> torch.Tensor:
    return fused.rms_norm(torch.ones(num_rows, 64), torch.ones(64), 1e-6)


def test_kernels_are_compiled_by_other_threads_and_not_launched(toolchain: Toolchain) -> None:
    with ahead.compiled_side_by_side(2):
        made = norm()
        norm()
        fused.act_mul(torch.ones(4, 64))
    assert sorted(name for name, _ in toolchain.compiled) == ["_act_mul_kernel", "_norm_kernel"]
    assert threading.get_ident() not in toolchain.threads
    assert not toolchain.launched and not made.any()  # what nobody wrote is an index that every table has
    norm()
    assert len(toolchain.compiled) == 2 and toolchain.launched == {"_norm_kernel": 1}


def test_who_listens_to_the_compiler_still_hears_of_all_and_alone_afterwards(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def listen(*, src: Any, **_: Any) -> None:
        heard.append(src.name)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    with ahead.compiled_side_by_side(2) as compiled:
        norm()
    assert compiled == heard == ["_norm_kernel"] and knobs.compilation.listener is listen
    toolchain.is_warm = True
    with ahead.compiled_side_by_side(2) as compiled:
        fused.act_mul(torch.ones(4, 64))
    assert heard == ["_norm_kernel", "_act_mul_kernel"] and not compiled


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_start_whose_kernels_are_in_the_cache_looks_no_further_than_two_steps(
    toolchain: Toolchain, is_warm: bool
) -> None:
    ran: list[int] = []
    masked: list[bool] = []

    def run(plan: Any, _: Any, *, is_masked: bool) -> None:
        ran.append(int(plan.num_new.sum()))
        masked.append(is_masked)
        norm(len(ran))

    toolchain.is_warm = is_warm
    rows: Any = SimpleNamespace(
        page_table=torch.zeros(3, 2),
        max_len=8,
        apply=lambda plan: None,
        forget=lambda: None,
    )
    runners: Any = SimpleNamespace(run=run, propose=lambda *_: None)
    compile_steps(runners, rows, num_threads=2, max_batched_tokens=8)
    assert ran[:6] == [1, 1, 1, 1, 2, 2] and masked[:6] == [False, True] * 2 + [False] * 2
    assert (len(ran) == 6) == is_warm and (max(ran) > 2) != is_warm


def test_other_threads_launch_meanwhile(toolchain: Toolchain) -> None:
    with ahead.compiled_side_by_side(2):
        other = threading.Thread(target=norm)
        other.start()
        other.join()
        assert toolchain.launched == {"_norm_kernel": 1}


def test_what_cannot_be_compiled_fails_when_it_is_launched_and_not_before(toolchain: Toolchain) -> None:
    toolchain.failing = {"_norm_kernel"}
    with ahead.compiled_side_by_side(2):
        norm()
        fused.act_mul(torch.ones(4, 64))
        norm()
    fused.act_mul(torch.ones(4, 64))
    assert toolchain.launched == {"_act_mul_kernel": 1}
    with pytest.raises(RuntimeError, match="_norm_kernel cannot be compiled"):
        norm()
    toolchain.failing = set()
    norm()
    assert toolchain.launched["_norm_kernel"] == 1


def test_work_that_fails_is_told_and_leaves_triton_as_it_was(
    toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    launch, forgotten = JITFunction.run, []
    rows = SimpleNamespace(
        page_table=torch.zeros(3, 2),
        max_len=8,
        apply=lambda plan: None,
        forget=lambda: forgotten.append(1),
    )
    compile_steps(SimpleNamespace(run=run), rows, num_threads=2, max_batched_tokens=8)  # type: ignore[arg-type]
    assert "one by one, as they are launched: no such luck" in caplog.text
    assert JITFunction.run is launch and forgotten
    norm()
    assert toolchain.launched == {"_norm_kernel": 1}


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets engines on the CPU capture graphs, which are recorded; their kernels compute nothing, so all replays agree."""
    monkeypatch.setattr(resolve, "_check_backend", lambda config, on_cpu: None)
    monkeypatch.setattr(resolve, "_graphs", lambda config, on_cpu: config.runner.graphs)
    monkeypatch.setattr(runner_factory, "Capture", lambda device, exchange: RecordedCapture(exchange))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    with ahead._Zeros():  # type: ignore[no-untyped-call]
        yield


@pytest.fixture
def num_compiled(toolchain: Toolchain, recording: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each engine that is made: the kernels that its compiling pass has compiled."""
    torch.set_num_threads(1)
    found, make = [], runner_factory.make_runners

    def make_runners(*given: Any, **settings: Any) -> Any:
        work: Callable[..., None] = partial(
            compile_steps,
            rows=given[3],
            num_threads=2,
            max_batched_tokens=settings["max_batched_tokens"],
            num_draft=max(settings["widths"]) - 1,
        )

        def compiling(made: Any) -> None:
            work(made)
            found.append(len(toolchain.compiled))
            assert not toolchain.launched

        return make(*given, **settings | {"before_capture": compiling})

    monkeypatch.setattr(runner_factory, "make_runners", make_runners)
    return found


SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "graphs": "all",
    "max_model_len": 512,
    "max_running_requests": 9,
    "max_batched_tokens": 256,
    "kv_pages": 64,
    "host_cache_gib": 0,
}


@pytest.mark.parametrize("spec", some(["off", "ngram", "eagle3"], "off", "eagle3"))
def test_what_graphs_and_steps_launch_was_compiled_before(
    spec: str, tmp_path: Path, toolchain: Toolchain, num_compiled: list[int]
) -> None:
    heads = save_heads(tmp_path, SEED)
    settings = SIZES | {"spec": f"{spec}:{heads[spec]}" if spec in heads else spec}
    if spec != "off":
        settings["spec_steps"] = 3
    with LLM(**SETTINGS | settings) as llm:
        executor: Any = engine_of(llm)._executor
        num_draft = 0 if spec == "off" else 3
        warm_up_steps(executor._runners, executor._rows, max_batched_tokens=256, num_draft=num_draft)
        profile_steps(
            executor._runners, executor._rows, NoMeter(), max_batched_tokens=256, num_draft=num_draft, budget_bytes=0
        )
        assert executor._runners.num_nodes, "nothing was captured"
    (before,) = num_compiled
    print(before, Counter(name for name, _ in toolchain.compiled))
    assert toolchain.launched.total() > before > 20
    assert not [name for name, _ in toolchain.compiled[before:]], "compiled when it was launched"
    assert len(set(toolchain.compiled)) == len(toolchain.compiled)


def test_steps_of_any_size_find_kernels_of_latents_and_experts_compiled(
    toolchain: Toolchain, num_compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have tiles for few, some and many tokens; absorbed queries, for rows whose keys are split and not."""

    def stack(each: list[GatedMLP]) -> StackedExperts:
        """Experts as on a GPU."""
        gate_up, down = (torch.stack([getattr(mlp, name)._weight for mlp in each]) for name in ("gate_up", "down"))
        return StackedExperts(gate_up, down, each[0].down._ops)

    monkeypatch.setattr(decoder, "SparseExperts", stack)
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"n_routed_experts": 32, "num_experts_per_tok": 4, "q_lora_rank": 64, "num_attention_heads": 4}
    shape |= {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "vocab_size": 8192}
    monkeypatch.setitem(SHAPES, "glm-4.7-flash", SHAPES["glm-4.7-flash"] | shape)
    settings = {
        "shape": "glm-4.7-flash",
        "load_format": "dummy",
        "max_batched_tokens": 2048,
        "max_running_requests": 16,
    }
    with LLM(**SETTINGS | SIZES | settings) as llm:
        executor: Any = engine_of(llm)._executor
        for sizes, bound in (
            ((40,), 40),
            ((3,), 500),
            ((100, 70), 500),
            ((300,), 300),
            ((400,) * 2, 400),
            ((300,) * 4, 500),
        ):
            known, bounds = np.array(sizes, dtype=np.int32), np.full(len(sizes), bound, dtype=np.int32)
            plan = plan_without_pages(known, np.zeros_like(known), bounds, 0, SamplingParams(seed=0, temperature=0.0))
            with torch.inference_mode():
                executor._rows.apply(plan)
                executor._runners.run(plan, Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling=Drawing.GREEDY.value))
    assert {"_route_in_groups", "_product_kernel", "_store_latents"} <= set(toolchain.launched)
    (before,) = num_compiled
    assert not [name for name, _ in toolchain.compiled[before:]], "compiled when it was launched"


def test_steps_of_any_size_find_kernels_of_states_compiled(
    toolchain: Toolchain, num_compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode, verify, are short prompts or long ones, alone and together; a layer of each kind."""
    shape = {"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    shape |= {"linear_value_head_dim": 16, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    monkeypatch.setitem(SHAPES, "glm-4.7-flash", shape)
    settings = {"shape": "glm-4.7-flash", "load_format": "dummy", "max_batched_tokens": 1024, "page_size": 64}
    with LLM(**SETTINGS | SIZES | settings | {"spec": "ngram", "spec_steps": 3}) as llm:
        executor: Any = engine_of(llm)._executor
        for sizes in ((1,), (2, 1, 1), (16,), (17,), (3, 100), (1, 1, 1, 400), (70, 5, 200)):
            known = np.array(sizes, dtype=np.int32)
            bounds = np.full(len(sizes), 500, dtype=np.int32)
            plan = plan_without_pages(known, np.zeros_like(known), bounds, 0, SamplingParams(seed=0, temperature=0.0))
            with torch.inference_mode():
                executor._rows.apply(plan)
                executor._runners.run(plan, Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling=Drawing.GREEDY.value))
    of_states = {"_make_inputs", "_advance", "_solve_chunks", "_scan_chunks"}
    assert of_states <= set(toolchain.launched)
    assert not [name for name, _ in toolchain.compiled[num_compiled[0] :] if name in of_states], (
        "compiled when launched"
    )
