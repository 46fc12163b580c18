"""The scores of the whole engine in one process are transformers' log-softmax, whatever happened to the request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hiserve.core.plan import Scores
from hiserve.core.request import SamplingParams
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from tests.helpers.models import load_transformers
from tests.helpers.oracle import Subject, engine_of, make_subject

NUM_NEW = 24
NUM_TOP = {1: (0, 3), 2: (2, None), 3: (None, 1), 4: (5, 2)}  # of prompt and output, by request


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("llama", tmp_path_factory.mktemp("llama"))


def run(engine: Engine, prompts: dict[int, list[int]]) -> tuple[dict[int, list[int]], dict[int, bytes]]:
    """Returns tokens and packed scores of each request."""
    for uid, prompt in prompts.items():
        of_prompt, of_output = NUM_TOP[uid]
        sampling = SamplingParams(
            seed=5, max_tokens=NUM_NEW, ignore_eos=True, prompt_logprobs=of_prompt, logprobs=of_output
        )
        engine.add(Admit(uid, len(prompt), sampling, b"", 0), np.array(prompt, dtype=np.int32))
    out: dict[int, list[int]] = {uid: [] for uid in prompts}
    packed = dict.fromkeys(prompts, b"")
    while engine.has_work:
        updates = engine.step()
        if updates is None:
            continue
        at = score_at = 0
        for uid, count, words in zip(updates.uids, updates.counts, updates.score_words, strict=True):
            out[uid] += updates.tokens[at : at + count].tolist()
            packed[uid] += updates.scores[score_at : score_at + 4 * words]
            at, score_at = at + count, score_at + 4 * words
    return out, packed


@torch.inference_mode()
def check(
    folder: Path, prompt: list[int], out: list[int], num_top: tuple[int | None, int | None], packed: bytes
) -> None:
    """Compares one request's scores with those of transformers for the same tokens."""
    tokens = torch.tensor([prompt + out])
    oracle = load_transformers(folder, torch.float64)(tokens).logits[0].log_softmax(-1)
    at = 0
    for begin, end, top in ((1, len(prompt), num_top[0]), (len(prompt), tokens.shape[1], num_top[1])):
        if top is None:
            continue
        size = 4 * (end - begin) * (1 + 2 * top)
        scores, at = Scores.unpack(packed[at : at + size], top), at + size
        before = oracle[begin - 1 : end - 1]
        own = before.gather(1, tokens[0, begin:end, None])[:, 0]
        best = before.topk(top, dim=1)
        np.testing.assert_allclose(scores.logprobs, own.numpy(), atol=1e-5)
        np.testing.assert_allclose(scores.top_logprobs, best.values.numpy(), atol=1e-5)
        assert scores.top_tokens.tolist() == best.indices.tolist()
    assert at == len(packed)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("chunk", "kv_pages"), [(7, 200), (64, 1 + 24 + 6)])
def test_scores_are_those_of_transformers(subject: Subject, depth: int, chunk: int, kv_pages: int) -> None:
    """Twice the same: the second time most of it is cached."""
    engine = engine_of(subject, chunk=chunk, depth=depth, kv_pages=kv_pages)
    first = run(engine, subject.prompts)
    second = run(engine, subject.prompts)
    assert engine.stats().cached_tokens > 0
    assert (engine.stats().preemptions > 0) == (kv_pages < 200)
    engine.close()
    assert first[0] == second[0]
    for out, packed in (first, second):
        for uid, prompt in subject.prompts.items():
            assert len(out[uid]) == NUM_NEW
            check(subject.folder, prompt, out[uid], NUM_TOP[uid], packed[uid])


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_tokens_end_a_reply_but_not_before_its_least_length(subject: Subject, depth: int) -> None:
    engine = engine_of(subject, depth=depth)
    plain = subject.greedy[3]
    stop = plain[5]
    sampling = [
        SamplingParams(temperature=0, seed=1, max_tokens=NUM_NEW, stop_token_ids=(stop,), min_tokens=least)
        for least in (0, 10)
    ]
    for uid, params in enumerate(sampling):
        engine.add(Admit(uid, len(subject.prompts[3]), params, b"", 0), np.array(subject.prompts[3], dtype=np.int32))
    out: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_work:
        if (updates := engine.step()) is not None:
            parts = np.split(updates.tokens, np.cumsum(updates.counts, dtype=np.int64))[:-1]
            for uid, part in zip(updates.uids, parts, strict=True):
                out[uid] += part.tolist()
    engine.close()
    assert out[0] == plain[: plain.index(stop) + 1]
    assert len(out[1]) >= 10
    assert stop not in out[1][:10]
