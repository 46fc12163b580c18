"""Drafts that are served are those that the head would make of the same tokens, row by row and without any cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hiserve import SamplingParams
from hiserve.core.drafts import DraftChain
from hiserve.spec.head import HeadProposer
from tests.helpers.cache_paths import HOST, pool
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.drafted import Draft, Drafted, nano, save_heads
from tests.helpers.tiered import leave_device
from tests.helpers.widening import some
from tests.unit.tools.head_oracle import HeadOracle
from tools.nano.accept_served import bundled_head
from tools.nano.heads import AUX_LAYERS, Eagle3Head, Seen, observe, unroll

STEPS, SEED, NUM_CHECKED = 3, 11, 8
MAX_ERROR = 1e-3  # of a logit
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
    ("kind", "page_size", "depth"),
    some([("eagle3", 16, 0), ("eagle3", 1, 1), ("mtp", 16, 1), ("mtp", 4, 0)], ("eagle3", 1, 1)),
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


class Logits:
    """Notes what a head's drafts are drawn from, ``[S, vocab]`` for each draft of each step.

    Attributes:
        noted: By draft.
    """

    def __init__(self, subject: Drafted) -> None:
        proposer = subject.executor._runners._proposer
        assert isinstance(proposer, HeadProposer)
        self.noted: list[torch.Tensor] = []
        self._draft = proposer.draft
        proposer.draft = self._watch  # type: ignore[method-assign]

    def _watch(self, chain: DraftChain, tree: None, *, is_greedy: bool) -> None:
        self.noted.append(chain.logits.clone())
        self._draft(chain, tree, is_greedy=is_greedy)


@torch.no_grad()
def trained_logits(kind: str, draft: Draft) -> torch.Tensor:
    """What the trainer's head makes of the same tokens, ``[STEPS, vocab]``."""
    target = nano()
    head = bundled_head(kind, target)
    embedding, ids = target.embed_tokens.weight, torch.tensor([draft.known + draft.tokens])
    seen = observe(target, ids, head.aux_layers if isinstance(head, Eagle3Head) else AUX_LAYERS)
    normed = list(unroll(head, embedding, ids, seen, STEPS, len(draft.known) - 2, 1))
    return torch.stack([each[0, 0] @ head.output_weight(embedding).T for each in normed])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_shipped_heads_draft_from_the_logits_that_the_trainer_knew(kind: str) -> None:
    subject = Drafted(spec=kind, spec_steps=STEPS, overlap=0, **pool(16), **HOST | {"max_batched_tokens": 24})
    logits = Logits(subject)
    with subject.llm as llm:
        prompts = held_out_prompts("coffee", "services")[:4]
        results = [llm.generate(prompts, GREEDY) for _ in range(2)]
    assert sum(result.outputs[0].drafts.accepted for each in results for result in each if result.outputs[0].drafts) > 0
    assert all(result.cached.device for result in results[1] if len(result.prompt_token_ids) > 16)
    steps = [list(step.values()) for step in subject.drafts if step]
    assert len(logits.noted) == STEPS * len(steps)
    rng = np.random.default_rng(SEED)
    for index in {0, len(steps) - 1, *rng.choice(len(steps), NUM_CHECKED, replace=False).tolist()}:
        row = int(rng.integers(len(steps[index])))
        served = torch.stack([each[row] for each in logits.noted[index * STEPS : (index + 1) * STEPS]])
        error = float((served - trained_logits(kind, steps[index][row])).abs().max())
        assert error <= MAX_ERROR, f"behind {len(steps[index][row].known)} tokens"
