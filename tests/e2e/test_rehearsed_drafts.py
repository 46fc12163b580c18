"""Rehearsed drafts: no token is another for them, and as many are accepted as were to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.errors import ConfigError, ModelError
from hiserve.llm.rehearsed import RehearsedLLM
from hiserve.models.builtin_shapes import SHAPES
from hiserve.spec.rehearsed import chances
from tests.helpers.cache_paths import SETTINGS, Work, answer, pool
from tests.helpers.dialogues import trained
from tests.helpers.widening import some

STEPS, NUM_NEW, NUM_ROWS = 3, 64, 4
SAMPLING = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 1.0))
]


@pytest.fixture(scope="module")
def work() -> Work:
    prompts = np.random.default_rng(3).integers(1, 1000, size=(NUM_ROWS, 20)).tolist()
    return answer(prompts, SAMPLING)


@pytest.fixture(scope="module")
def llm() -> Any:
    settings = {name: value for name, value in SETTINGS.items() if name != "in_process"} | pool(16)
    with RehearsedLLM(**settings, spec=trained("eagle3"), spec_steps=STEPS, host_cache_gib=0) as llm:
        yield llm


def texts(work: Work) -> dict[int, list[int]]:
    pairs = enumerate(zip(work.prompts, work.expected, strict=True))
    return {seed: prompt + expected.token_ids for seed, (prompt, expected) in pairs}


@pytest.mark.parametrize("acceptance", some([0.0, 0.27, 0.7, 1.0], 0.27, 1.0))
def test_tokens_are_the_same_and_so_many_drafts_are_accepted(llm: Any, work: Work, acceptance: float) -> None:
    llm.flush()
    llm.rehearse(texts(work), acceptance)
    choices = [result.outputs[0] for result in llm.generate(work.prompts, work.sampling)]
    assert [choice.token_ids for choice in choices] == [expected.token_ids for expected in work.expected]
    use = sum((choice.drafts for choice in choices), DraftUse())
    num_cut = len(choices)  # a last step may be cut by the limit, and counts as refused
    num_refused = use.verify_steps - use.accepted_per_position[STEPS - 1]
    num_judged = use.accepted + num_refused
    bound = 3 * (acceptance * (1 - acceptance) / num_judged) ** 0.5 + 1.001 * num_cut / num_judged
    print(acceptance, use.accepted / num_judged, num_judged, bound)
    assert abs(use.accepted / num_judged - acceptance) <= bound
    if acceptance == 1.0:
        assert num_refused <= num_cut
        assert use.verify_steps <= num_cut * -(-NUM_NEW // (1 + STEPS))
    if acceptance == 0.0:
        assert use.accepted == 0


SMALL: dict[str, dict[str, Any]] = {
    "v4-flash-like": {
        "vocab_size": 5000,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "sliding_window": 16,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "compress": {"rope_type": "default", "rope_theta": 1.6e5, "partial_rotary_factor": 0.25},
        },
    },
    "qwen3.5-35b-a3b": {
        "vocab_size": 5000,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("shape", some(SMALL, "qwen3.5-35b-a3b"))
def test_the_head_of_a_shape_with_random_weights_is_rehearsed(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut down to small sizes: its windows, states, compressed rows and head are all there."""
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | SMALL[shape])
    settings = {name: value for name, value in SETTINGS.items() if name != "in_process"}
    settings |= {"shape": shape, "load_format": "dummy", "host_cache_gib": 0, "max_model_len": 256}
    prompts = np.random.default_rng(5).integers(1, 5000, size=(2, 60)).tolist()
    sampling = [SamplingParams(temperature=0.0, seed=seed, max_tokens=33, ignore_eos=True) for seed in range(2)]
    with LLM(**settings, in_process=True, spec="off") as plain:
        expected = [result.outputs[0].token_ids for result in plain.generate(prompts, sampling)]
    with RehearsedLLM(**settings, spec="mtp", spec_steps=STEPS) as llm:
        for acceptance, num_steps in ((0.0, 32), (0.7, None), (1.0, 8)):
            llm.flush()
            llm.rehearse({seed: prompts[seed] + expected[seed] for seed in range(2)}, acceptance)
            choices = [result.outputs[0] for result in llm.generate(prompts, sampling)]
            assert [choice.token_ids for choice in choices] == expected
            uses = [choice.drafts for choice in choices]
            assert num_steps is None or [use and use.verify_steps for use in uses] == [num_steps] * 2, uses


def test_a_shape_without_a_head_has_none_to_rehearse() -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "in_process"}
    with pytest.raises(ModelError, match=r"--shape qwen3-0\.6b has no mtp head"):
        RehearsedLLM(**settings, shape="qwen3-0.6b", load_format="dummy", spec="mtp")


def test_chances_are_even_and_do_not_repeat_from_request_to_request() -> None:
    seeds, positions = np.indices((32, 2048))
    found = chances(seeds, positions)
    assert found.min() >= 0
    assert found.max() < 1
    counts = np.histogram(found, bins=16, range=(0, 1))[0]
    assert np.abs(counts - found.size / 16).max() < 4 * (found.size / 16) ** 0.5
    assert np.array_equal(found, chances(seeds, positions))
    for each in (
        np.corrcoef(found[:-1].ravel(), found[1:].ravel()),
        np.corrcoef(found[:, :-1].ravel(), found[:, 1:].ravel()),
    ):
        assert abs(each[0, 1]) < 4 / found.size**0.5


def test_there_is_nothing_to_pay_for_without_a_head() -> None:
    with pytest.raises(ConfigError, match="at the cost of a head"):
        RehearsedLLM(**{name: value for name, value in SETTINGS.items() if name != "in_process"}, spec="ngram")
