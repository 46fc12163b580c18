"""The heads that came with hiserve-nano: what is accepted of held-out text is what the recipe predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import HOST, SETTINGS, pool
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.tiered import leave_device
from tests.helpers.widening import some
from tools.nano.accept import SOURCES, figures, prompts_of
from tools.nano.accept_served import BARS, MAX_DIFFERENCE, STEPS, bundled_head, greedy_drafts, predict, serve
from tools.nano.head_files import load_target
from tools.nano.model import Nano
from tools.nano.stream import DIALOGUES, load_corpus

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "out/nano/corpus.npz"  # where the recipe puts it
MAX_BYTES = {"eagle3": 5_000_000, "mtp": 3_000_000}
NUM_NEW = 40
FEW = 1.4, 2.3  # accept lengths that few and short replies reach as well: of one draft, of three
ENGINE = SETTINGS | pool(16, 4096) | {"dtype": "float32", "max_model_len": 1024, "max_batched_tokens": 512}
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def target() -> Nano:
    torch.set_num_threads(1)
    return load_target(find_model(NANO), torch.device("cpu"))


def dialogues() -> list[np.ndarray]:
    return [np.array(prompt) for prompt in held_out_prompts(*DIALOGUES)[::2]]


def check_alike(served: DraftUse, predicted: DraftUse) -> None:
    assert abs(served.accept_length / predicted.accept_length - 1) <= MAX_DIFFERENCE, (served, predicted)


@pytest.mark.parametrize("kind", STEPS)
def test_a_head_is_as_small_as_promised(kind: str) -> None:
    files = {path.name: path.stat().st_size for path in (find_model(NANO) / kind).iterdir()}
    assert files.keys() == {"config.json", "model.safetensors"}
    assert sum(files.values()) <= MAX_BYTES[kind]


@pytest.mark.parametrize("kind", some(STEPS, "eagle3"))
def test_served_drafts_are_accepted_as_predicted_wherever_their_prompt_came_from(kind: str, target: Nano) -> None:
    head = bundled_head(kind, target)
    with LLM(**ENGINE | HOST | {"host_cache_gib": 0.05, "spec": kind, "spec_steps": STEPS[kind]}) as llm:
        for path in ("cold", "host"):
            if path == "host":
                leave_device(llm)
            served = serve(llm, dialogues(), GREEDY)
            check_alike(served.use, predict(head, target, served.replies, STEPS[kind]))
            print(path, served.use)
    assert served.use.accept_length >= FEW[STEPS[kind] > 1]


def test_the_models_own_head_drafts_unless_told_otherwise() -> None:
    with LLM(**ENGINE | {"spec_steps": "auto", "host_cache_gib": 0}) as llm:
        assert (llm.settings.spec.spec, llm.settings.spec.spec_steps) == ("eagle3", "auto")
        assert serve(llm, dialogues(), GREEDY).use.accepted > 0


def test_drafts_drawn_with_the_noise_of_their_places_are_accepted_more_often_than_the_likeliest() -> None:
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(**ENGINE | {"spec": "eagle3", "spec_steps": 3, "host_cache_gib": 0}) as llm:
        coupled = serve(llm, dialogues(), sampling)
        with greedy_drafts(llm):
            greedy = serve(llm, dialogues(), sampling)
    for ours, theirs in zip(coupled.replies, greedy.replies, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
    assert coupled.use.accept_length > greedy.use.accept_length > 1.5, (coupled.use, greedy.use)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CORPUS.is_file(), reason="needs the corpus that tools/nano/README.md makes")
@pytest.mark.parametrize("kind", STEPS)
def test_all_held_out_text_is_served_as_predicted(kind: str, target: Nano) -> None:
    corpus, head, steps = load_corpus(CORPUS), bundled_head(kind, target), STEPS[kind]
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=200)
    replies = {}
    with LLM(**ENGINE | {"max_running_requests": 8, "spec": kind, "spec_steps": steps, "host_cache_gib": 0}) as llm:
        for source in SOURCES:
            served = serve(llm, prompts_of(corpus, "report", source, 100), sampling)
            replies[source] = served.replies
            check_alike(served.use, predict(head, target, served.replies, steps))
    found = figures(head, target, replies, numbers=(steps,))
    assert found["dialogues"][f"k{steps}"]["whole_accept_length"] >= BARS[kind]
