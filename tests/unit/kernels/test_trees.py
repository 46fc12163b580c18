"""Trees of drafts on the device: the twins against rules applied node by node, Triton against the twins."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hiserve.config.settings import TreeShape
from hiserve.kernels import step_reference, tree_reference
from hiserve.kernels.noise import gumbel
from tests.helpers.grown_trees import SHAPES, grow_trees, logits_of
from tests.helpers.interpreted import run_interpreted
from tests.helpers.step_cases import StepCase, random_case, with_trees

PROGRAM = """
import torch
from hiserve.kernels import step_inputs, step_reference, step_triton, tree_growth, tree_reference
from tests.helpers.grown_trees import SHAPES, grow_trees, logits_of
from tests.helpers.step_cases import filled, random_case, with_trees

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
step_inputs._TOKEN_BLOCK, step_triton._MOVE_BLOCK = 32, 8
num_cases = num_walked = 0
while num_cases < 12:
    case = with_trees(generator, random_case(generator))
    if case is None:
        continue
    num_cases += 1
    made, twin = case.unfilled(is_stale=True), case.unfilled(is_stale=True)
    step_triton.fill_inputs(made, case.state, page_size=case.page_size)
    step_reference.fill_inputs(twin, case.state, page_size=case.page_size)
    ours, theirs = filled(made), filled(twin)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), (name, ours[name], theirs[name])
    counts, path = step_reference.walk(case.drawn, case.sampling_rows, case.sampling_drafts, case.state)
    found = step_triton.walk(case.drawn, case.sampling_rows, case.sampling_drafts, case.state)
    assert torch.equal(found[0], counts) and torch.equal(found[1], path), (found, counts, path)
    num_walked += int((counts > 1).sum())
    slots, starts = twin.forward.slots, twin.forward.qo_indptr[twin.sampling]
    pools = [torch.randn(1, 2, 704, 3, 5, generator=generator), torch.arange(704).to(torch.uint8).view(1, 1, -1, 1, 1)]
    pools = [pool.contiguous() for pool in pools]
    moved = [pool.clone() for pool in pools]
    counts = counts * twin.legal[twin.sampling]
    step_reference.move(pools, slots, starts, path, counts)
    step_triton.move(moved, slots, starts, path, counts)
    assert all(torch.equal(*both) for both in zip(pools, moved, strict=True)), (slots, path, counts)
assert num_walked > 3, num_walked
tree_growth._SCORE_BLOCK = 32
for shape in SHAPES:
    logits = logits_of(shape, 70, generator, torch.float32)
    logits[-1][0, :66] = -torch.inf
    for is_greedy in (True, False):
        grown, expected = (grow_trees(ops, shape, logits, is_greedy=is_greedy) for ops in (tree_growth, tree_reference))
        for ours, theirs in zip(grown.words(), expected.words(), strict=True):
            assert torch.equal(ours, theirs), (shape, is_greedy, ours, theirs)
        torch.testing.assert_close(grown.candidates.worth, expected.candidates.worth)
    grown, expected = (grow_trees(ops, shape, logits, is_greedy=True, is_coarse=True) for ops in (tree_growth, tree_reference))
    for ours, theirs in zip(grown.words(), expected.words(), strict=True):
        assert torch.equal(ours, theirs), (shape, "equal worths", ours, theirs)
"""


def cases(count: int) -> list[StepCase]:
    generator, found = torch.Generator().manual_seed(3), list[StepCase]()
    while len(found) < count:
        if (case := with_trees(generator, random_case(generator))) is not None:
            found.append(case)
    return found


def test_a_node_stands_at_its_depth_and_is_stored_at_its_number() -> None:
    seen: Counter[str] = Counter()
    for case in cases(60):
        made = case.unfilled(is_stale=True)
        step_reference.fill_inputs(made, case.state, page_size=case.page_size)
        forward, trees = made.forward, case.state.trees
        assert trees is not None and forward.tree_mask is not None
        for token, number in enumerate(forward.token_rows.tolist()):
            row, node = int(made.rows[number]), int(made.offsets[token])
            place = int(forward.kv_lens[number]) - int(made.num_new[number]) + node
            mask = int(trees.masks[row, node]) if made.num_draft[number] else 0
            depth = bin(mask).count("1") - 1 if mask else node
            assert (int(forward.tree_mask[token]), int(forward.positions[token])) == (mask, place - node + depth)
            page = int(case.state.page_table[row, place // case.page_size]) if made.legal[number] else 0
            assert forward.slots[token] == page * case.page_size + place % case.page_size
            seen["branched"] += depth < node
            seen["plain"] += not mask
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_accepted_nodes_move_into_adjacent_slots_and_nothing_else_changes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    num_moved = 0
    for _ in range(20):
        slots = torch.randperm(90, generator=generator)[:24]  # of three rows of 8 nodes
        paths = torch.stack([torch.randperm(7, generator=generator)[:4].sort().values + 1 for _ in range(3)])
        path = torch.cat((torch.zeros((3, 1), dtype=torch.int64), paths), 1)
        counts = torch.randint(0, 6, (3,), generator=generator)
        storage = torch.randint(10**6, (2, 2, 90, 1, 3), generator=generator).to(dtype)
        expected = storage.clone()
        for row, count in enumerate(counts.tolist()):
            for depth in range(1, count):  # at once, as the nodes of a path ascend
                source, target = slots[8 * row + int(path[row, depth])], slots[8 * row + depth]
                expected[:, :, target] = storage[:, :, source]
                num_moved += int(source != target)
        step_reference.move([storage], slots, torch.tensor([0, 8, 16], dtype=torch.int32), path, counts)
        assert torch.equal(storage, expected)
    assert num_moved > 60


def test_candidates_are_the_highest_of_logits_with_the_noise_of_their_position() -> None:
    logits = torch.randn((2, 3, 50), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temperature = torch.tensor([0.0, 0.7], dtype=torch.float64)
    seed, choice, position = torch.tensor([3, 4]), torch.tensor([0, 2]), torch.tensor([11, 12])
    noise = gumbel(seed, choice, position, step_reference.SAMPLE_STREAM, 50)
    scores = logits + (temperature[:, None] * noise)[:, None]
    chances, tokens = tree_reference.likeliest(logits, (temperature, seed, choice, position), 4)
    for row in range(2):
        for node in range(3):
            mine = scores[row, node].softmax(-1)
            assert tokens[row, node].tolist() == mine.argsort(descending=True)[:4].tolist()
            torch.testing.assert_close(chances[row, node], mine[tokens[row, node]])
    # The first is the token that a draw from these logits takes; a row without a temperature has its own logits alone.
    drawn = step_reference.draw_free(
        logits[1], *(each[1:].repeat(3) for each in (temperature, seed, choice, position)), None
    )
    assert torch.equal(tokens[1, :, 0], drawn)
    plain = tree_reference.likeliest(logits, None, 4)
    assert torch.equal(plain[1][0], tokens[0]) and not torch.equal(plain[1][1], tokens[1])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_level_has_the_likeliest_tokens_after_the_best_nodes_of_the_one_before(shape: TreeShape) -> None:
    """Node by node: worth, parents, masks, and the row of logits that each was found in."""
    logits = logits_of(shape, 30, torch.Generator().manual_seed(6), torch.float64)
    grown, width = grow_trees(tree_reference, shape, logits, is_greedy=True), shape.width
    for tree in range(4):
        before, paths = [(-1, 1.0, tree, 0)], dict[int, int]()  # candidate, worth, row of logits, nodes on its path
        for depth, level in enumerate(logits):
            found, first = [], grown.candidates.places(depth).start
            for parent, worth, source, seen in before:
                chances = level[source].softmax(-1)
                for token in chances.argsort(descending=True)[:width].tolist():
                    number = first + len(found)
                    assert int(grown.candidates.tokens[tree, number]) == token
                    assert int(grown.candidates.parents[tree, number]) == parent
                    assert float(grown.candidates.worth[tree, number]) == pytest.approx(worth * float(chances[token]))
                    found.append((number, worth * float(chances[token]), source, seen))
            best = sorted(found, key=lambda each: -each[1])[:width]
            before = []
            for place, (number, worth, source, seen) in enumerate(best if depth + 1 < shape.depth else []):
                nodes, paths[number] = grown.nodes[depth], seen | 1 << (depth * width + place)
                assert int(nodes.candidates[tree, place]) == number
                assert int(nodes.tokens[tree, place]) == int(grown.candidates.tokens[tree, number])
                assert (int(nodes.sources[tree, place]), int(nodes.masks[tree, place])) == (source, paths[number])
                before.append((number, worth, tree * width + place, paths[number]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_that_gets_a_chain_gets_the_best_path_and_an_illegal_one_nothing(shape: TreeShape) -> None:
    logits = logits_of(shape, 30, torch.Generator().manual_seed(8), torch.float64)
    grown = grow_trees(tree_reference, shape, logits, is_greedy=True)
    found, trees = grown.candidates, grown.state.trees
    assert trees is not None
    last = found.places(shape.depth - 1)
    node, path = last.start + int(found.worth[1, last].argmax()), list[int]()
    while node >= 0:
        path.insert(0, int(found.tokens[1, node]))
        node = int(found.parents[1, node])
    path = path[: shape.num_draft]
    assert grown.state.tokens[2, 7 : 7 + len(path)].tolist() == path
    assert (grown.state.tokens[2, 7 + len(path) :] == -7).all()
    assert trees.masks[2, : shape.num_nodes].tolist() == [(2 << node) - 1 for node in range(shape.num_nodes)]
    assert (grown.state.tokens[3] == -7).all() and not trees.masks[3].any()
    assert (grown.state.tokens[4, : shape.num_draft] != -7).all() and (
        grown.state.tokens[4, shape.num_draft :] == -7
    ).all()


def test_triton_does_what_the_twins_do() -> None:
    run_interpreted(PROGRAM)
