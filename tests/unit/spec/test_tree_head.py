"""Where a proposer of trees writes: after the known tokens of a row, within its slots, and nowhere for illegal rows."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftLayout
from hiserve.kernels.draft_ops import DraftNodes, draft_ops_for
from hiserve.runners.device_rows import DeviceRows
from hiserve.spec.head import HeadProposer, TreeProposer

MAX_LEN, VOCAB, FREE = 20, 50, -7
SHAPES = {"branched": (2, 3, 7), "chain": (1, 4, 5), "few_of_one_level": (4, 1, 3)}


class DrawnHead:
    """Logits that were drawn before."""

    aux_layers = ()

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def prepare(self, step: DraftChain) -> DraftChain:
        return step

    def compute(self, chain: DraftChain, nodes: DraftNodes, states: Tensor) -> tuple[Tensor, Tensor]:
        count = nodes.tokens.numel()
        assert states.index_select(0, nodes.sources.flatten()).shape == (count, 1)
        return torch.randn((count, VOCAB), generator=self._generator), torch.zeros((count, 1))


@pytest.mark.parametrize("shape", [TreeShape(*shape) for shape in SHAPES.values()], ids=list(SHAPES))
def test_drafts_are_written_in_slots_of_their_own_row_alone(shape: TreeShape) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = DeviceRows(5, MAX_LEN, 4, 40, "cpu", max_draft=shape.num_nodes - 1, max_depth=shape.depth)
    assert rows.state.trees is not None
    rows.tokens[1:] = FREE
    rows.state.trees.masks[1:] = 1
    head = cast(HeadProposer, DrawnHead(generator))
    proposer = TreeProposer(head, [shape], rows.state, rows.sampling, draft_ops_for(rows.device))
    positions = {1: 9, 2: MAX_LEN - 2, 3: MAX_LEN, 4: 5}  # of which the last is illegal
    chain = DraftChain(
        rows=torch.tensor([*positions]),
        legal=torch.tensor([True, True, True, False]),
        positions=torch.tensor([*positions.values()]),
        logits=torch.randn((4, VOCAB), generator=generator),
        carried=torch.zeros((4, 1)),
        layout=DraftLayout.uniform(4, 1, MAX_LEN, rows.device),
        is_static=False,
    )
    proposer.draft(chain, shape, is_greedy=True)
    for row, position in positions.items():
        end = position if row == 4 else min(position + shape.num_nodes - 1, MAX_LEN)
        is_draft = (torch.arange(MAX_LEN) >= position) & (torch.arange(MAX_LEN) < end)
        assert ((rows.tokens[row] != FREE) == is_draft).all()
        assert (rows.state.trees.masks[row, 1:] == 1).all() == (row == 4)
    assert (rows.tokens[5] == FREE).all() and not rows.tokens[0].any()


def test_drafts_are_a_chain_until_a_tree_is_written() -> None:
    shape, generator = TreeShape(2, 3, 7), torch.Generator().manual_seed(4)
    rows = DeviceRows(3, MAX_LEN, 4, 40, "cpu", max_draft=shape.num_draft, max_depth=shape.depth)
    assert rows.state.trees is not None
    head = cast(HeadProposer, DrawnHead(generator))
    proposer = TreeProposer(head, [shape], rows.state, rows.sampling, draft_ops_for(rows.device))
    chain = DraftChain(
        rows=torch.tensor([1, 3]),
        legal=torch.tensor([True, True]),
        positions=torch.tensor([5, 6]),
        logits=torch.randn((2, VOCAB), generator=generator),
        carried=torch.zeros((2, 1)),
        layout=DraftLayout.uniform(2, 1, MAX_LEN, rows.device),
    )
    step: Any = chain  # which the head returns
    chains = rows.state.trees.masks.clone()
    proposer.draft(chain, shape, is_greedy=True)
    assert (rows.state.trees.masks[[1, 3]] != chains[[1, 3]]).any(1).all()
    assert proposer.prepare(step) is chain
    assert torch.equal(rows.state.trees.masks, chains)
