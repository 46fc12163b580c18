"""What proposers are worth: all of the model's own drafts are accepted, hardly one of a head that knows nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from hiserve import LLM, SamplingParams
from hiserve.llm.outputs import RequestOutput
from tests.helpers.cache_paths import SMALL_MODEL, check, pool
from tests.helpers.dialogues import trained
from tests.helpers.draft_heads import edit
from tests.helpers.small_model import save_small_model, small_model
from tests.helpers.widening import in_turn, some
from tools.nano.heads import HEADS

NUM_NEW = 40
PROMPTS = [
    "I would like a small latte with oat milk, please.",
    "Can you book a table for two tonight?",
    "Find me a cheap hotel in Boston.",
]
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1),
    "drawn": SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1),
}


def generate(sampling: SamplingParams, **settings: Any) -> list[RequestOutput]:
    with LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0} | settings) as llm:
        return llm.generate(PROMPTS, sampling)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[RequestOutput]]:
    return {how: generate(sampling, spec="off") for how, sampling in SAMPLING.items()}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of another model of the same shape."""
    other = tmp_path_factory.mktemp("other")
    save_small_model(other, seed=2)
    tensors = load_file(other / "mtp" / "model.safetensors")
    both = next(name for name in tensors if "eh_proj" in name)  # would pass on the embedding, which is the model's own
    edit(other / "mtp", add={both: -tensors[both]})
    return {kind: other / kind for kind in HEADS}


@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.parametrize(("steps", "depth"), some([(1, 0), (3, 1), (7, 0)], (3, 1)))
def test_a_model_that_drafts_for_itself_is_right_every_time(
    plain: dict[str, list[RequestOutput]], how: str, steps: int, depth: int
) -> None:
    """Drawn tokens too: drafts are drawn with the noise of their places."""
    for result, expected in zip(
        generate(SAMPLING[how], spec=trained("draft_model", small_model()), spec_steps=steps, overlap=depth),
        plain[how],
        strict=True,
    ):
        (choice,), (theirs,) = result.outputs, expected.outputs
        check(choice, theirs)
        assert choice.drafts is not None
        whole, rest = divmod(NUM_NEW - 1, steps + 1)  # the prompt gives the first token
        assert choice.drafts.verify_steps == whole + bool(rest)
        assert choice.drafts.accepted == whole * steps + max(0, rest - 1)


@pytest.mark.parametrize(
    ("kind", "page_size", "max_len"),
    [
        ("eagle3", 4, 32),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product(("ngram", "draft", *HEADS), (1, 16), (32, 35))
        ],
    ],
)
def test_rows_draft_up_to_their_end_and_beyond_it(
    heads: dict[str, Path], kind: str, page_size: int, max_len: int
) -> None:
    """The context ends inside a run of drafts, at a page's end or before it: nothing is told of those behind it."""
    settings: dict[str, Any] = {"max_model_len": max_len, "max_running_requests": 2, **pool(page_size, 128)}
    spec = {"ngram": "ngram", "draft": trained("draft_model", small_model())} | {
        each: f"{each}:{folder}" for each, folder in heads.items()
    }
    sampling = msgspec.structs.replace(SAMPLING["drawn"], max_tokens=100)
    plain, drafted = (generate(sampling, **settings, **each) for each in ({}, {"spec": spec[kind], "spec_steps": 7}))
    for result, expected in zip(drafted, plain, strict=True):
        check(result.outputs[0], expected.outputs[0])
        assert len(result.prompt_token_ids) + len(result.outputs[0].token_ids) == max_len


@pytest.mark.parametrize(("how", "kind"), in_turn(SAMPLING, HEADS))
def test_a_head_that_knows_nothing_costs_no_token(
    plain: dict[str, list[RequestOutput]], heads: dict[str, Path], how: str, kind: str
) -> None:
    accepted = steps = 0
    for result, expected in zip(
        generate(SAMPLING[how], spec=f"{kind}:{heads[kind]}", spec_steps=3), plain[how], strict=True
    ):
        (choice,), (theirs,) = result.outputs, expected.outputs
        check(choice, theirs)
        assert choice.drafts is not None
        accepted, steps = accepted + choice.drafts.accepted, steps + choice.drafts.verify_steps
    assert 1 + accepted / steps <= 1.05
