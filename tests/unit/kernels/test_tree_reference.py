"""Trees against the enumeration of their paths, and against models that see each path alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve.config.settings import MAX_TREE_NODES
from hiserve.core.forward import ForwardInputs
from hiserve.kernels import step_reference
from hiserve.kernels.step_ops import RowTensors, TreeTensors
from hiserve.kernels.tree_reference import DraftTree, Level, beam, build_tree, first_level, next_level
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner

# --- the golden vector --------------------------------------------------------------------
# Inputs and outputs of SGLang's test of its tree builder (test_build_eagle_tree.py, Apache 2.0): 2 trees of 8 nodes,
# 4 levels with 4 candidates each, of which 4 are expanded.

GOLDEN_WORTH = (
    (
        "0.71127 0.28292 0.0022995 0.0017357",
        "0.97476 0.022219 0.00065031 0.00013212",
    ),
    (
        "0.69142 0.012863 0.0016873 0.0011871 0.24787 0.018818 0.014204 0.00092235 "
        "0.0022971 1.67e-06 1.8737e-07 8.3146e-08 0.0012771 0.00024374 0.00017832 1.1947e-05",
        "0.084832 0.066068 0.058304 0.057851 0.0023616 0.0011243 0.00054368 0.00027768 "
        "0.00025286 0.00015578 2.8817e-05 1.2888e-05 0.00012834 2.5417e-06 1.1279e-06 1.6088e-08",
    ),
    (
        "0.66438 0.026997 2.4236e-05 4.0821e-06 0.24402 0.0028409 0.00050935 0.00029022 "
        "0.016178 0.0020567 0.00045892 3.0034e-05 0.013023 0.00050497 0.00036371 8.775e-05",
        "0.023263 0.020054 0.009399 0.0027783 0.064156 0.00055506 0.00010429 9.7211e-05 "
        "0.04995 0.005063 0.00090068 0.00033656 0.0075817 0.00085731 0.00069972 0.00060793",
    ),
    (
        "0.6642 0.00010525 6.5864e-05 1.2253e-06 0.13019 0.10461 0.0052083 0.0016777 "
        "0.020103 0.0067335 0.00012625 1.0364e-05 0.015142 0.00070819 9.6595e-05 8.7951e-05",
        "0.058608 0.001884 0.00078535 0.000444 0.012185 0.0020684 0.0017418 0.0014327 "
        "0.0062455 0.0061487 0.0026862 0.0018034 0.001859 0.0016151 0.0012481 0.00036038",
    ),
)
GOLDEN_TOKENS = (
    (
        "29896 29906 29900 29945",
        "13 2 29871 28956",
    ),
    (
        "29889 29974 29945 29900 29974 29922 29930 29958 29889 29974 29930 29945 29974 29922 29930 29958",
        "22550 4136 16492 8439 29871 2 3001 13 2 13 29906 29946 2 13 29871 259",
    ),
    (
        "29946 29945 29953 29906 29896 29945 29900 29906 29896 29945 29906 29953 29896 29945 29906 29946",
        "29871 2 29901 29889 29871 2 395 259 29901 29871 2 29889 3001 1234 7146 2186",
    ),
    (
        "29946 29974 29945 29930 29889 29922 29974 29930 29974 29946 29930 29922 29889 29974 29945 29922",
        "29941 29906 2 29946 29871 450 319 14990 29946 29941 2 29906 29871 2 3001 13",
    ),
)
# Of all candidates, those whose children the next level holds; the first four are level 0, sixteen a level follow.
GOLDEN_EXPANDED = (
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((4, 8, 9, 10), (4, 5, 6, 7)),
    ((20, 24, 21, 28), (24, 28, 20, 21)),
)
GOLDEN_STARTS = (0, 4, 20)


def golden_level(index: int) -> Level:
    worth = torch.tensor([[float(word) for word in tree.split()] for tree in GOLDEN_WORTH[index]])
    tokens = torch.tensor([[int(word) for word in tree.split()] for tree in GOLDEN_TOKENS[index]])
    if index == 0:
        return Level(worth, tokens, torch.zeros_like(tokens))
    parents = torch.tensor(GOLDEN_EXPANDED[index - 1]) - GOLDEN_STARTS[index - 1]
    return Level(worth, tokens, parents.repeat_interleave(4, 1))


def test_the_golden_tree() -> None:
    tree = build_tree([golden_level(index) for index in range(4)], 8)
    depths = [[len(path) - 1 for path in paths_of(tree, index)] for index in range(2)]
    assert depths == [[0, 1, 1, 2, 2, 3, 3, 4], [0, 1, 2, 2, 2, 2, 3, 4]]
    children = [[children_of(tree, index, node) for node in range(8)] for index in range(2)]
    assert children[0] == [[1, 2], [3], [4], [5], [6], [7], [], []]
    assert children[1] == [[1], [2, 3, 4, 5], [], [6], [], [], [7], []]
    assert tree.drafts[0].tolist() == [29896, 29906, 29889, 29974, 29946, 29896, 29946]
    assert tree.drafts[1].tolist() == [13, 22550, 4136, 16492, 8439, 29871, 29941]


def test_the_candidates_that_the_golden_tree_expands_are_the_beam() -> None:
    for index, expanded in enumerate(GOLDEN_EXPANDED):
        chosen = beam(golden_level(index), 4) + GOLDEN_STARTS[index]
        assert chosen.tolist() == [list(candidates) for candidates in expanded]


# --- against the enumeration of paths -----------------------------------------------------


@dataclass
class Grown:
    """What a draft said, level by level, and what becomes of it."""

    probabilities: list[Tensor]
    tokens: list[Tensor]
    levels: list[Level]


def grow(*, num_trees: int, size: int, depth: int, seed: int) -> Grown:
    """Random drafts with many equal probabilities, 0, 1, NaN and what rounding leaves of 1 among them."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor([0.0, 0.25, 0.5, 0.5, 1.0, 1.0 + 1e-6, torch.nan, 0.3, 0.7])

    def draw(*shape: int) -> tuple[Tensor, Tensor]:
        chances = grid[torch.randint(len(grid), (*shape, size), generator=generator)]
        return chances, torch.rand((*shape, 12), generator=generator).argsort(-1)[..., :size]  # all different

    chances, tokens = draw(num_trees)
    grown = Grown([chances], [tokens], [first_level(chances, tokens)])
    for _ in range(depth - 1):
        expanded = beam(grown.levels[-1], size)
        chances, tokens = draw(num_trees, expanded.shape[1])
        grown.levels.append(next_level(grown.levels[-1], expanded, chances, tokens))
        grown.probabilities.append(chances)
        grown.tokens.append(tokens)
    return grown


def enumerate_paths(grown: Grown, tree: int, size: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every candidate's worth and path in order, the beam found by sorting."""
    chances = [np.nan_to_num(level[tree].numpy(), nan=0.0).clip(0, 1) for level in grown.probabilities]
    before = list(zip(chances[0].tolist(), [(token,) for token in grown.tokens[0][tree].tolist()], strict=True))
    every = list(before)
    for level in range(1, len(chances)):
        best = sorted(range(len(before)), key=lambda index: -before[index][0])[:size]
        before = [
            (float(np.float32(before[index][0]) * chances[level][place, child]), (*before[index][1], token))
            for place, index in enumerate(best)
            for child, token in enumerate(grown.tokens[level][tree, place].tolist())
        ]
        every += before
    return every


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("size", "depth"), [(1, 5), (2, 4), (3, 3), (4, 4), (8, 1)])
def test_a_tree_is_that_of_the_paths_that_are_worth_most(size: int, depth: int, seed: int) -> None:
    grown = grow(num_trees=3, size=size, depth=depth, seed=seed)
    num_candidates = sum(level.worth.shape[1] for level in grown.levels)
    for num_nodes in {1, 2, min(7, num_candidates), min(MAX_TREE_NODES, num_candidates + 1)}:
        built = build_tree(grown.levels, num_nodes)
        for tree in range(3):
            every = enumerate_paths(grown, tree, size)
            best = sorted(range(len(every)), key=lambda index: -every[index][0])[: num_nodes - 1]
            paths = [(), *(every[index][1] for index in sorted(best))]
            node = {path: index for index, path in enumerate(paths)}
            assert len(node) == num_nodes, "two nodes have the same path"
            assert built.drafts[tree].tolist() == [path[-1] for path in paths[1:]]
            on_path = [{node[path[:length]] for length in range(len(path) + 1)} for path in paths]
            assert built.masks[tree].tolist() == [sum(1 << other for other in seen) for seen in on_path]


def test_a_chain_is_the_tree_of_one_candidate_a_level() -> None:
    grown = grow(num_trees=3, size=1, depth=5, seed=1)
    built = build_tree(grown.levels, 6)
    assert torch.equal(built.drafts, torch.cat([tokens.view(3, 1) for tokens in grown.tokens], 1))
    assert built.masks.tolist() == [[1, 3, 7, 15, 31, 63]] * 3


def test_masks_have_room_for_so_many_nodes() -> None:
    level = first_level(torch.rand(1, 64), torch.arange(64)[None])
    assert build_tree([level], MAX_TREE_NODES).masks[0, -1].item() == 2**62 + 1
    with pytest.raises(AssertionError, match="64 nodes"):
        build_tree([level], 64)
    with pytest.raises(AssertionError, match="nodes of 2"):
        build_tree([first_level(torch.rand(1, 2), torch.tensor([[5, 6]]))], 4)


# --- the walk -----------------------------------------------------------------------------


def paths_of(tree: DraftTree, index: int) -> list[tuple[int, ...]]:
    """Each node's nodes from the root to itself, by its mask."""
    return [tuple(other for other in range(63) if mask >> other & 1) for mask in tree.masks[index].tolist()]


def children_of(tree: DraftTree, index: int, node: int) -> list[int]:
    """The nodes whose parent it is."""
    paths = paths_of(tree, index)
    return [other for other, path in enumerate(paths) if path[:-1] == paths[node]]


def walk(tree: DraftTree, drawn: Tensor, max_depth: int) -> tuple[list[int], list[list[int]]]:
    """The tokens that each row emits, and its path, of rows of one known token."""
    num_trees, num_nodes = tree.masks.shape
    nothing, lengths = torch.zeros((num_trees, 1), dtype=torch.int32), torch.ones(num_trees, dtype=torch.int64)
    tokens = torch.cat((nothing, tree.drafts.int()), 1)
    trees = TreeTensors(tree.masks, lengths > 1, max_depth)
    state = RowTensors(tokens, lengths - 1, lengths, nothing, nothing, nothing[:, 0], trees=trees)
    counts, path = step_reference.walk(drawn, torch.arange(num_trees), lengths * (num_nodes - 1), state)
    assert path.shape == (num_trees, max_depth + 1)
    return counts.tolist(), path.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "depth", "num_nodes"), [(1, 4, 5), (2, 4, 9), (4, 3, 16)])
def test_a_walk_takes_the_longest_path_that_was_drawn(size: int, depth: int, num_nodes: int, seed: int) -> None:
    grown = grow(num_trees=40, size=size, depth=depth, seed=seed)
    tree = build_tree(grown.levels, num_nodes)
    drawn = torch.randint(4, (40, num_nodes), generator=torch.Generator().manual_seed(seed))
    # What no chance could draw is drawn: many nodes draw one of their children, where they have any.
    for index, node in itertools.product(range(40), range(num_nodes)):
        if (children := children_of(tree, index, node)) and (index + 3 * node) % 5 > 1:
            drawn[index, node] = tree.drafts[index, children[index % len(children)] - 1]
    counts, paths = walk(tree, drawn, depth)
    for index, (count, found) in enumerate(zip(counts, paths, strict=True)):
        tokens, said = [-1, *tree.drafts[index].tolist()], drawn[index].tolist()
        agreed = [
            path
            for path in paths_of(tree, index)
            if all(said[parent] == tokens[node] for parent, node in itertools.pairwise(path))
        ]
        path = list(max(agreed, key=len))
        assert count == len(path)
        assert found == path + path[-1:] * (depth + 1 - count)
    assert 1 < np.mean(counts) < depth + 1


@pytest.mark.parametrize("seed", range(3))
def test_what_a_tree_emits_is_what_decoding_emits(seed: int) -> None:
    """The next token is a function of all before it: drafts change how many come at once, and nothing else."""

    def follow(context: tuple[int, ...]) -> int:
        return hash((seed, *context)) % 3

    context: tuple[int, ...] = (1,)
    generator = torch.Generator().manual_seed(seed)
    counts = []
    while len(context) < 60:
        levels = [first_level(torch.rand((1, 2), generator=generator), torch.tensor([[0, 2]]))]
        for _ in range(2):
            chances = torch.rand((1, 2, 2), generator=generator)
            levels.append(next_level(levels[-1], beam(levels[-1], 2), chances, torch.tensor([[[1, 0], [2, 1]]])))
        tree = build_tree(levels, 8)
        tokens = [-1, *tree.drafts[0].tolist()]
        drawn = [follow((*context, *(tokens[node] for node in path[1:]))) for path in paths_of(tree, 0)]
        (count,), (path,) = walk(tree, torch.tensor([drawn]), 3)
        counts.append(count)
        context += tuple(drawn[node] for node in path[:count])
    expected: tuple[int, ...] = (1,)
    while len(expected) < len(context):
        expected += (follow(expected),)
    assert context == expected
    assert np.mean(counts) > 1.2


def test_a_walk_along_a_chain_counts_as_the_acceptance_of_drafts_does() -> None:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(2, (200, 5), generator=generator)
    tokens = torch.randint(2, (200, 20), generator=generator, dtype=torch.int32)
    nothing, lengths = torch.zeros((200, 1), dtype=torch.int32), torch.full((200,), 3)
    chains = TreeTensors(torch.tensor([1, 3, 7, 15, 31]).expand(200, -1), lengths == 0, 4)
    state = RowTensors(tokens, lengths - 1, lengths, nothing, nothing, nothing[:, 0], trees=chains)
    num_draft = torch.arange(200) % 5  # the other nodes are none of a row's
    counts, path = step_reference.walk(drawn, torch.arange(200), num_draft, state)
    assert torch.equal(counts, step_reference.accept(drawn, torch.arange(200), num_draft, state))
    assert path.tolist() == [[min(depth, count - 1) for depth in range(5)] for count in counts.tolist()]
    assert set(counts.tolist()) == {1, 2, 3, 4, 5}


# --- the forward that verifies ------------------------------------------------------------

PAGE = 16


class Rows:
    """Two rows of different lengths over interleaved pages, for a model's forward without a planner."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]], dtype=torch.int32)

    @torch.inference_mode()
    def logits(self, tokens: list[Tensor], positions: Tensor, places: Tensor, masks: Tensor | None) -> list[Tensor]:
        """Stores each row's tokens at their places, and returns ``[n, vocab_size]`` of each."""
        engine = self._engine
        counts = [len(row) for row in tokens]
        rows = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        lengths = places[[0, counts[0]]] + torch.tensor(counts)
        inputs = ForwardInputs(
            input_ids=torch.cat(tokens).int(),
            positions=positions,
            slots=self._table[rows, places // PAGE].long() * PAGE + places % PAGE,
            token_rows=rows,
            qo_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
            kv_lens=lengths,
            page_table=self._table,
            logits_rows=torch.arange(len(rows)),
            q_lens=np.array(counts, dtype=np.int32),
            kv_bounds=lengths.int().numpy(),
            max_kv_len=int(lengths.max()),
            tree_mask=masks,
        )
        engine.attention.plan(inputs)
        out = engine.model.forward(inputs, engine.pool.layers("kv"), engine.attention)
        return list(out.logits.split(counts))


def test_each_node_has_the_logits_that_its_path_alone_gives(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = save_llama(tmp_path)
    subject = Engine(folder, dtype="float64", attention="reference", page_size=PAGE, num_pages=9)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 300, (length,), generator=generator) for length in (13, 30)]
    first = torch.tensor([len(prompt) for prompt in prompts])
    rows = Rows(subject)
    whole_prompts = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    rows.logits(prompts, whole_prompts, whole_prompts, None)

    grown = grow(num_trees=2, size=3, depth=3, seed=6)
    tree = build_tree(grown.levels, 12)
    assert all(any(len(children_of(tree, row, node)) > 1 for node in range(12)) for row in range(2)), "no branches"
    tokens = torch.cat((torch.tensor([[7], [9]]), tree.drafts), 1)
    depths = torch.tensor([[len(path) - 1 for path in paths_of(tree, row)] for row in range(2)])
    positions, places = (first[:, None] + depths).flatten(), (first[:, None] + torch.arange(12)).flatten()
    logits = rows.logits(list(tokens), positions, places, tree.masks.flatten())

    for row in range(2):
        for node, path in enumerate(paths_of(tree, row)):
            alone = Engine(folder, dtype="float64", attention="reference")
            whole = prompts[row].tolist() + tokens[row, list(path)].tolist()
            expected = alone.logits(HandPlanner(16, 60), {1: whole}, chunk=64)[1][-1]
            torch.testing.assert_close(logits[row][node], expected, rtol=1e-9, atol=1e-9)
    causal = rows.logits(list(tokens), positions, places, None)
    assert not torch.allclose(causal[0], logits[0]), "the masks hide nothing"
