"""The whole engine in one process, with settings that look at what came before, against transformers' logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.ipc.messages import Admit
from hiserve.models.model_config import NANO, find_model, read_model_config
from tests.helpers.models import load_transformers
from tests.helpers.oracle import Subject, continuation, engine_of, generate, make_subject
from tests.helpers.widening import in_turn

ASKED = {
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=1
    ),
    "drawn": SamplingParams(
        temperature=1.1, top_p=0.95, min_p=0.02, frequency_penalty=0.5, logit_bias={5: 1.0, 6: -100.0}, seed=8
    ),
    "few": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=9),
    "minimum": SamplingParams(temperature=0.7, min_tokens=9, stop_token_ids=(11, 12, 13), presence_penalty=0.1, seed=3),
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("name", "depth"), in_turn(ASKED, [1, 0]))
def test_replies_over_prefixes_chunks_and_preemptions(subject: Subject, name: str, depth: int) -> None:
    oracle = load_transformers(subject.folder, torch.float64)
    wanted = {}
    for row, prompt in subject.prompts.items():
        tokens = continuation(oracle, prompt, ASKED[name])
        ends = [at for at, token in enumerate(tokens) if token in ASKED[name].stop_token_ids]
        assert not ends, "choose stop tokens that do not come"
        wanted[row] = tokens
    assert wanted not in (subject.greedy, subject.sampled)
    roomy = engine_of(subject, chunk=16, depth=depth)
    tight = engine_of(subject, chunk=16, depth=depth, kv_pages=36)
    for engine in (roomy, tight):
        for _ in range(2):
            assert generate(engine, subject.prompts, ASKED[name]) == wanted
    assert roomy.stats().cached_tokens > 0
    assert tight.stats().preemptions > 0
    roomy.close()
    tight.close()


def test_the_models_end_tokens_wait_for_the_minimum(subject: Subject) -> None:
    """A token that ends the reply is what the bias asks for, always."""
    nano = find_model(NANO)
    (end,) = read_model_config(nano).eos_token_ids
    engine = engine_of(dataclasses.replace(subject, folder=nano))
    for uid, min_tokens in ((1, 0), (2, 5)):
        asked = SamplingParams(temperature=0.0, logit_bias={end: 100.0}, min_tokens=min_tokens, max_tokens=20, seed=1)
        prompt = np.array(subject.prompts[2], dtype=np.int32)
        engine.add(Admit(uid=uid, num_prompt=prompt.size, sampling=asked, namespace=b"", choice=0), prompt)
    told: dict[int, list[int]] = {1: [], 2: []}
    while engine.has_work:
        updates = engine.step()
        if updates is not None:
            for uid, part in zip(updates.uids, np.split(updates.tokens, np.cumsum(updates.counts)[:-1]), strict=True):
                told[uid] += part.tolist()
            assert set(updates.finishes) <= {0, FinishReason.STOP}
    engine.close()
    assert told[1] == [end]
    assert len(told[2]) == 6
    assert told[2].index(end) == 5
