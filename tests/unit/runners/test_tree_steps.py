"""What a step with trees hands on: the tokens before each node, for penalties, and the accepted paths, for the proposer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from hiserve.core.plan import BatchPlan
from hiserve.kernels import step_reference
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.inputs import fill_inputs, uniform_inputs
from hiserve.runners.step_output import _ahead, _on_paths, record
from tests.helpers.recorded import RecordedCapture
from tests.helpers.step_cases import random_case, with_trees

# The parent of each node of a tree of 15, four levels deep.
PARENTS = (0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 8, 9, 12)


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


def test_one_graph_accepts_every_path_of_a_tree() -> None:
    """It moves the keys and values of the path and no others."""
    num_nodes, known, page = len(PARENTS), 6, 4
    storage = torch.zeros((2, 2, 20 * page, 1, 3))
    rows = DeviceRows(1, 60, page, 20, "cpu", max_draft=14, max_depth=5, storages=[storage])
    paths: list[list[int]] = [[0]]
    for node in range(1, num_nodes):
        paths.append([*paths[PARENTS[node]], node])
    assert rows.state.trees is not None and max(map(len, paths)) == 6
    masks = torch.tensor([sum(1 << node for node in path) for path in paths])
    drafts = torch.arange(100, 100 + num_nodes - 1, dtype=torch.int32)

    def reset() -> None:
        rows.warm_up(known + num_nodes)
        rows.known_len[1:], rows.computed_len[1:] = known, known - 1
        rows.tokens[1:, known : known + num_nodes - 1] = drafts
        rows.state.trees.masks[1:] = masks  # type: ignore[union-attr]
        storage.copy_(torch.arange(storage.numel()).view(storage.shape))

    reset()
    inputs = uniform_inputs(torch.tensor([[1], [60]]), num_nodes, 60, rows)
    drawn = torch.zeros((1, num_nodes), dtype=torch.int64)

    def step() -> None:
        fill_inputs(inputs, rows)
        record(inputs, drawn, rows)

    step()
    graph = RecordedCapture().record(step)
    for path in paths:
        reset()
        before, expected = storage.clone(), storage.clone()
        drawn.fill_(7)  # a token of no node
        for parent, node in pairwise(path):
            drawn[0, parent] = drafts[node - 1]
        graph.replay()
        slots = [(1 + (known - 1 + node) // page) * page + (known - 1 + node) % page for node in range(num_nodes)]
        for depth, node in enumerate(path):
            expected[:, :, slots[depth]] = before[:, :, slots[node]]
        assert torch.equal(storage, expected)
        end = known + len(path)
        assert rows.tokens[1, known:end].tolist() == [*(int(drafts[node - 1]) for node in path[1:]), 7]
        assert (int(rows.known_len[1]), int(rows.computed_len[1])) == (end, end - 1)
        assert inputs.path is not None and inputs.path[0, : len(path)].tolist() == path
