"""The eager path on CUDA, through the executor, against the float32 reference on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hiserve.core.request import SamplingParams
from hiserve.engine.graph_check import no_sync
from hiserve.models.model_config import NANO, find_model
from tests.gpu.reference_engine import MAX_LEN, NUM_PAGES, engine
from tests.helpers import oracle
from tests.helpers.cuda import run_all
from tests.helpers.margin import as_tensor, join, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine, save_family, save_llama, save_qwen3
from tests.helpers.plans import GREEDY, HandPlanner

pytestmark = pytest.mark.gpu

NUM_NEW = 250
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "llama": save_llama(tmp_path_factory.mktemp("llama")),
        "qwen3": save_qwen3(tmp_path_factory.mktemp("qwen3")),
        "qwen3_moe": save_family("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe")),
        "gemma3_text": save_family("gemma3_text", tmp_path_factory.mktemp("gemma3_text")),
        "gpt_oss": save_family("gpt_oss", tmp_path_factory.mktemp("gpt_oss")),
        "nano": find_model(NANO),
    }


def prompts_of(name: str, folder: Path) -> dict[int, list[int]]:
    return dict(enumerate(oracle.prompts_of(name, folder), start=1))


def generate(
    subject: Engine, prompts: dict[int, list[int]], sampling: SamplingParams = GREEDY, num_new: int = NUM_NEW
) -> dict[int, list[int]]:
    """One chunked prefill, then decode steps, all submitted before the first result is read."""
    planner = HandPlanner(16, NUM_PAGES, shuffle_seed=1)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    plans = []
    while left := {row: count for row, prompt in prompts.items() if (count := len(prompt) - planner.computed[row]) > 0}:
        plans.append(planner.step({row: min(16, count) for row, count in left.items()}))
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(num_new - 1)]
    return run_all(subject, plans)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("qwen3", "float32"),
        ("qwen3_moe", "float32"),
        ("gemma3_text", "float32"),
        ("gpt_oss", "float32"),
        ("nano", "float32"),
        ("nano", "bfloat16"),
    ],
)
def test_greedy_tokens_keep_the_margin_of_the_cpu_reference(folders: dict[str, Path], name: str, dtype: str) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    prompts = prompts_of(name, folders[name])
    tokens = generate(engine(folders[name], dtype), prompts)
    forced = {row: teacher_forced(prompt, tokens[row]) for row, prompt in prompts.items()}
    reference = engine(folders[name], "float32", "cpu").logits(HandPlanner(16, NUM_PAGES), forced, MAX_LEN)
    # Two batch shapes, on two devices: on CUDA alone a tiny bfloat16 model rounds alike in every shape.
    shapes = [
        engine(folders[name], dtype, device).logits(HandPlanner(16, NUM_PAGES), forced, chunk)
        for device, chunk in (("cuda", 64), ("cpu", 7))
    ]
    verdict = join(
        [
            margin(reference[row][len(prompt) - 1 :], as_tensor(tokens[row]), shape_difference(*shapes))
            for row, prompt in prompts.items()
        ]
    )
    print(name, dtype, verdict, flush=True)
    assert len({token for row in tokens.values() for token in row}) >= 20
    assert verdict.is_kept, verdict


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_float64_tokens_equal_those_of_the_cpu(folders: dict[str, Path], name: str) -> None:
    prompts = prompts_of(name, folders[name])
    for sampling in (GREEDY, SAMPLED):
        cuda = generate(engine(folders[name], "float64"), prompts, sampling, 40)
        assert cuda == generate(engine(folders[name], "float64", "cpu"), prompts, sampling, 40)


@pytest.mark.parametrize("name", ["nano", "qwen3_moe"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_launching_a_step_never_waits_for_the_device(
    folders: dict[str, Path], name: str, sampling: SamplingParams
) -> None:
    prompts = prompts_of(name, folders[name])
    subject = engine(folders[name], "bfloat16")
    with no_sync():
        tokens = generate(subject, prompts, sampling, 10)
    assert len(tokens[1]) == 10
    subject.executor.close()


def test_a_stale_entry_is_a_fault_on_cuda_too(folders: dict[str, Path]) -> None:
    subject = engine(folders["llama"], "float32")
    planner = HandPlanner(16, NUM_PAGES)
    planner.admit(1, list(range(20)))
    planner.admit(2, list(range(20)))
    subject.executor.submit(planner.step({1: 20, 2: 20})).result()
    subject.rows.page_owner[planner.pages[1][0]] = 99
    result = subject.executor.submit(planner.step({1: 1, 2: 1})).result()
    assert result.faults.tolist() == [1]
    assert result.counts.tolist() == [0, 1]


def test_the_whole_engine_on_cuda_gives_transformers_tokens_in_float64(tmp_path: Path) -> None:
    """With overlap, over a prefix of the first pass, and with a pool too small for all."""
    subject = oracle.make_subject("llama", tmp_path)
    roomy = oracle.engine_of(subject, chunk=16, depth=1, device="cuda")
    tight = oracle.engine_of(subject, chunk=16, depth=1, kv_pages=36, device="cuda")
    for running in (roomy, tight):
        for _ in range(2):
            assert oracle.generate(running, subject.prompts) == subject.greedy
        assert oracle.generate(running, subject.prompts, oracle.SAMPLED) == subject.sampled
        running.close()
    assert roomy.stats().cached_tokens > 0
    assert tight.stats().preemptions >= 1
