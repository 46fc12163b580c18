"""Drafts that are served are those that the head would make of the same tokens, row by row and without any cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hiserve import SamplingParams
from tests.helpers.cache_paths import HOST, pool
from tests.helpers.drafted import Draft, Drafted, nano, save_heads
from tests.helpers.tiered import leave_device
from tests.unit.tools.head_oracle import HeadOracle
from tools.nano.heads import Seen, observe

STEPS, SEED, NUM_CHECKED = 3, 11, 8
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return save_heads(tmp_path_factory.mktemp("heads"), SEED)


class Oracle:
    """A head in float64, over the states of the target in the recipe's form."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._target = nano().float()
        tensors = load_file(folder / "model.safetensors")
        self._head = HeadOracle(kind, tensors, self._target.config, self._target.embed_tokens.weight.detach())

    @torch.no_grad()
    def drafts(self, known: list[int]) -> list[int]:
        ids = torch.tensor(known)
        seen = observe(self._target, ids[None])
        of_row = Seen(aux=seen.aux[0], last=seen.last[0])
        logits = self._head.chain(ids, of_row, len(known) - 2, STEPS, lambda drafts: int(drafts[-1].argmax()))
        return logits.argmax(-1).tolist()


def check(oracle: Oracle, drafts: list[Draft]) -> None:
    """Compares some, the first behind a prompt and the last among them."""
    rng = np.random.default_rng(SEED)
    picked = {0, len(drafts) - 1, *rng.choice(len(drafts), NUM_CHECKED - 2, replace=False).tolist()}
    for index in sorted(picked):
        assert drafts[index].tokens == oracle.drafts(drafts[index].known), f"behind {len(drafts[index].known)} tokens"


@pytest.mark.parametrize(
    ("kind", "page_size", "depth"), [("eagle3", 16, 0), ("eagle3", 1, 1), ("mtp", 16, 1), ("mtp", 4, 0)]
)
def test_drafts_are_those_of_the_head_wherever_the_prompt_came_from(
    heads: dict[str, Path], kind: str, page_size: int, depth: int
) -> None:
    oracle = Oracle(kind, heads[kind])
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in (37, 18)]
    subject = Drafted(
        spec=f"{kind}:{heads[kind]}",
        spec_steps=STEPS,
        overlap=depth,
        **pool(page_size),
        **HOST | {"max_batched_tokens": 24},
    )
    with subject.llm as llm:
        for path in ("cold", "device", "host"):
            subject.drafts.clear()
            if path == "host":
                leave_device(llm)
            results = llm.generate(prompts, GREEDY)
            sources = [getattr(result.cached, path, 0) for result in results]
            assert path == "cold" or all(sources), (path, sources)
            check(oracle, [draft for step in subject.drafts for draft in step.values()])
