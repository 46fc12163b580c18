"""What a step with trees hands on: the tokens before each node, for penalties, and the accepted paths, for the proposer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hiserve.core.plan import BatchPlan
from hiserve.kernels import step_reference
from hiserve.runners.step_output import _ahead, _on_paths
from tests.helpers.step_cases import random_case, with_trees


def test_the_tokens_before_a_node_are_those_of_its_path() -> None:
    generator, num_branched = torch.Generator().manual_seed(9), 0
    for _ in range(60):
        case = with_trees(generator, random_case(generator))
        if case is None or not len(case.inputs.sampling):
            continue
        made = case.unfilled()
        step_reference.fill_inputs(made, case.state, page_size=case.page_size)
        forward, trees = made.forward, case.state.trees
        assert trees is not None
        ends = forward.qo_indptr[1:].long()[made.sampling] - 1
        drafts = made.num_draft[made.sampling]
        drawing = (ends - drafts)[:, None] + torch.minimum(torch.arange(made.width), drafts[:, None])
        made = replace(made, forward=replace(forward, logits_rows=drawing.flatten()))
        places, tokens = _ahead(made)
        for entry, token in enumerate(drawing.flatten().tolist()):
            number = int(forward.token_rows[token])
            node, start = int(made.offsets[token]), int(forward.qo_indptr[number])
            mask = int(trees.masks[made.rows[number], node]) if made.num_draft[number] else 0
            path = [start + other for other in range(6) if mask >> other & 1] or [token]
            found = set(zip(places[entry].tolist(), tokens[entry].tolist(), strict=True))
            assert found == {(int(forward.positions[each]), int(forward.input_ids[each])) for each in path}
            num_branched += len(path) <= node
    assert num_branched > 20


def test_a_proposer_gets_the_accepted_path_of_a_row_and_all_tokens_of_others() -> None:
    num_new, num_draft = np.array([4, 1, 3, 5], np.int32), np.array([3, 0, 2, 0], np.int32)
    samples = np.array([True, True, True, False])
    plan = BatchPlan(
        step_id=1,
        rows=np.arange(1, 5, dtype=np.int32),
        num_new=num_new,
        num_draft=num_draft,
        samples=samples,
        num_scored=np.zeros(4, np.int32),
        max_len=num_new,
    )
    path = torch.tensor([[0, 2, 3], [0, 0, 0], [0, 2, 2]])
    kept = _on_paths(plan, np.array([3, 1, 3, 5], np.int32), path)
    assert kept.tolist() == [0, 2, 3, 4, 5, 7, 7, 8, 9, 10, 11, 12]
