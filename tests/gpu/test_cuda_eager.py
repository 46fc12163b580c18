"""The eager path on CUDA, through the executor, against the float32 reference on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import SamplingParams
from hiserve.models.config import NANO, find_model
from tests.helpers import oracle
from tests.helpers.margin import as_tensor, join, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine, save_family, save_llama, save_qwen3
from tests.helpers.plans import GREEDY, HandPlanner

pytestmark = pytest.mark.gpu

NUM_NEW, NUM_PAGES, MAX_LEN = 250, 400, 512
DEVICES = ("cuda", "cpu")
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=9)
# Row by row, so that every step finds each part of the sampler wanted by some rows and not by others.
EVERYTHING = (
    SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=5, prompt_logprobs=3, seed=1
    ),
    SamplingParams(
        temperature=0.9, top_k=100, top_p=0.9, presence_penalty=0.7, min_tokens=30, stop_token_ids=(3, 9, 40), seed=2
    ),
    SamplingParams(temperature=1.2, min_p=0.02, logit_bias={7: 4.0, 8: -100.0}, logprobs=0, seed=3),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.05, prompt_logprobs=0, seed=2**62),
    SamplingParams(temperature=1.0, logprobs=20, seed=5),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "llama": save_llama(tmp_path_factory.mktemp("llama")),
        "qwen3": save_qwen3(tmp_path_factory.mktemp("qwen3")),
        "qwen3_moe": save_family("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe")),
        "nano": find_model(NANO),
    }


@contextmanager
def no_sync() -> Iterator[None]:
    """Makes any implicit wait for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prompts_of(name: str, folder: Path) -> dict[int, list[int]]:
    return dict(enumerate(oracle.prompts_of(name, folder), start=1))


def engine(folder: Path, dtype: str, device: str = "cuda") -> Engine:
    return Engine(
        folder, dtype=dtype, device=device, attention="reference", num_pages=NUM_PAGES, max_len=MAX_LEN, max_rows=8
    )


def run(
    subject: Engine, prompts: dict[int, list[int]], sampling: Sequence[SamplingParams], num_new: int
) -> list[tuple[BatchPlan, StepResult]]:
    """One chunked prefill, then decode steps, all submitted before the first result is read; rows ask in turn."""
    planner = HandPlanner(16, NUM_PAGES, shuffle_seed=1)
    for (row, prompt), params in zip(prompts.items(), cycle(sampling), strict=False):
        planner.admit(row, prompt, params)
    plans = []
    while left := {row: count for row, prompt in prompts.items() if (count := len(prompt) - planner.computed[row]) > 0}:
        plans.append(planner.step({row: min(16, count) for row, count in left.items()}))
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(num_new - 1)]
    flying = [(plan, subject.executor.submit(plan)) for plan in plans]
    return [(plan, future.result()) for plan, future in flying]


def tokens_of(steps: list[tuple[BatchPlan, StepResult]], num_new: int) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for plan, result in steps:
        assert result.faults.size == 0
        for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
            out.setdefault(row, []).append(token)
    return {row: tokens[:num_new] for row, tokens in out.items()}


def generate(
    subject: Engine, prompts: dict[int, list[int]], sampling: SamplingParams = GREEDY, num_new: int = NUM_NEW
) -> dict[int, list[int]]:
    return tokens_of(run(subject, prompts, [sampling], num_new), num_new)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("qwen3", "float32"),
        ("qwen3_moe", "float32"),
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


def test_every_sampling_parameter_means_on_cuda_what_it_means_on_the_cpu(folders: dict[str, Path]) -> None:
    """In float64, in one batch: tokens, their scores, and those of prompts."""
    prompts = dict(enumerate([*prompts_of("llama", folders["llama"]).values(), list(range(50, 90))], start=1))
    cuda, cpu = (run(engine(folders["llama"], "float64", device), prompts, EVERYTHING, 40) for device in DEVICES)
    tokens = tokens_of(cpu, 40)
    assert tokens_of(cuda, 40) == tokens
    assert all(len(set(each)) >= 10 for each in tokens.values())
    assert not {3, 9, 40} & set(tokens[2][:30]), "min_tokens was told to keep them out"
    assert 7 in tokens[3]
    num_scores = 0
    for (_, got), (_, expected) in zip(cuda, cpu, strict=True):
        for ours, theirs in ((got.scores, expected.scores), (got.prompt_scores, expected.prompt_scores)):
            assert (ours is None) == (theirs is None)
            if ours is None or theirs is None:
                continue
            num_scores += ours.logprobs.size
            assert ours.top_tokens.tolist() == theirs.top_tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=1e-6, atol=1e-9)
    assert num_scores > 40 * len(prompts)


@pytest.mark.parametrize("name", ["nano", "qwen3_moe"])
@pytest.mark.parametrize("sampling", [[GREEDY], [SAMPLED], EVERYTHING], ids=["greedy", "sampled", "everything"])
def test_launching_a_step_never_waits_for_the_device(
    folders: dict[str, Path], name: str, sampling: Sequence[SamplingParams]
) -> None:
    prompts = prompts_of(name, folders[name])
    subject = engine(folders[name], "bfloat16")
    with no_sync():
        steps = run(subject, prompts, sampling, 10)
    assert len(tokens_of(steps, 10)[1]) == 10
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
