"""Guards of trees of drafts: growth, choice of nodes, masks, the walk."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TREE = "hiserve/spec/tree.py"
OF_TESTS = "tests/unit/spec/test_tree.py::"
GOLDEN = OF_TESTS + "test_the_golden_tree"
PATHS = OF_TESTS + "test_a_tree_is_that_of_the_paths_that_are_worth_most"
WALK = OF_TESTS + "test_a_walk_takes_the_longest_path_that_was_drawn"
FORWARD = OF_TESTS + "test_each_node_has_the_logits_that_its_path_alone_gives"
ROOM = OF_TESTS + "test_masks_have_room_for_so_many_nodes"

MUTANTS = [
    # --- growth ---
    Mutant(
        name="a broken draft is worth more than any",
        file=TREE,
        old="probabilities.nan_to_num(nan=0.0).clamp(0.0, 1.0)",
        new="probabilities.clamp(0.0, 1.0)",
        test=PATHS,
    ),
    Mutant(
        name="rounding makes a child worth more than its parent",
        file=TREE,
        old="probabilities.nan_to_num(nan=0.0).clamp(0.0, 1.0)",
        new="probabilities.nan_to_num(nan=0.0)",
        test=PATHS,
    ),
    Mutant(
        name="a node is worth its own chance alone",
        file=TREE,
        old="level.worth.gather(1, expanded)[:, :, None] * _chances(probabilities)",
        new="_chances(probabilities)",
        test=PATHS,
    ),
    Mutant(
        name="the beam is what comes first",
        file=TREE,
        old="return level.worth.argsort(dim=-1, descending=True, stable=True)[:, :size]",
        new="return torch.zeros_like(level.tokens).argsort(dim=-1, stable=True)[:, :size]",
        test=OF_TESTS + "test_the_candidates_that_the_golden_tree_expands_are_the_beam",
    ),
    Mutant(
        name="parents are counted in the beam",
        file=TREE,
        old="expanded[:, :, None].expand_as(tokens)",
        new="torch.arange(expanded.shape[1])[:, None].expand_as(tokens)",
        test=PATHS,
    ),
    # --- choice ---
    Mutant(
        name="of equal nodes the last is chosen",
        file=TREE,
        old="worth.argsort(dim=-1, descending=True, stable=True)[:, : num_nodes - 1]",
        new="worth.flip(1).argsort(dim=-1, descending=True, stable=True).sub(worth.shape[1] - 1).neg()[:, : num_nodes - 1]",
        test=PATHS,
    ),
    Mutant(
        name="nodes stand in the order of their worth",
        file=TREE,
        old="[:, : num_nodes - 1].sort(-1).values",
        new="[:, : num_nodes - 1]",
        test=GOLDEN,
    ),
    Mutant(
        name="parents are looked for a level too high",
        file=TREE,
        old="level.parents + start for level, start in zip(levels[1:], starts, strict=False)",
        new="level.parents for level, start in zip(levels[1:], starts, strict=False)",
        test=GOLDEN,
    ),
    Mutant(
        name="the first level hangs below its first node",
        file=TREE,
        old="    parents = parents.masked_fill(chosen < starts[1], 0)\n",
        new="",
        test=GOLDEN,
    ),
    Mutant(
        name="trees have more nodes than masks have bits",
        file=TREE,
        old="min(MAX_NODES, 1 + worth.shape[1])",
        new="1 + worth.shape[1]",
        test=ROOM,
    ),
    Mutant(
        name="chains have more nodes than masks have bits",
        file=TREE,
        old='    assert num_draft < MAX_NODES, f"{num_draft} drafts"\n',
        new="",
        test=ROOM,
    ),
    # --- masks, positions, lists ---
    Mutant(
        name="a node does not see itself",
        file=TREE,
        old="masks = own | masks.gather(1, up)",
        new="masks = masks.gather(1, up)",
        test=PATHS,
    ),
    Mutant(
        name="a node sees its parent and no further",
        file=TREE,
        old="masks = own | masks.gather(1, up)",
        new="masks = own | own.gather(1, up)",
        test=FORWARD,
    ),
    Mutant(
        name="the root lies below itself",
        file=TREE,
        old="(depths.gather(1, up) + 1).masked_fill(nodes == 0, 0)",
        new="depths.gather(1, up) + 1",
        test=GOLDEN,
    ),
    Mutant(
        name="positions count nodes",
        file=TREE,
        old="(first[:, None] + tree.depths).flatten()",
        new="(first[:, None] + nodes + 0 * tree.depths).flatten()",
        test=FORWARD,
    ),
    Mutant(
        name="nodes of one depth share a slot",
        file=TREE,
        old="(first[:, None] + nodes).flatten()",
        new="(first[:, None] + tree.depths + 0 * nodes).flatten()",
        test=FORWARD,
    ),
    Mutant(
        name="a node is its own sibling",
        file=TREE,
        old="(nodes > nodes[:, None])",
        new="(nodes >= nodes[:, None])",
        test=GOLDEN,
    ),
    # --- the walk ---
    Mutant(
        name="any node with the drawn token is accepted",
        file=TREE,
        old="is_next = (tree.parents == node) & (tree.tokens == token)",
        new="is_next = (tree.parents >= 0) & (tree.tokens == token)",
        test=WALK,
    ),
    Mutant(
        name="any child is accepted",
        file=TREE,
        old="is_next = (tree.parents == node) & (tree.tokens == token)",
        new="is_next = tree.parents == node",
        test=WALK,
    ),
    Mutant(
        name="a walk goes on after a miss",
        file=TREE,
        old="goes_on = goes_on & is_next.any(1, keepdim=True)",
        new="goes_on = is_next.any(1, keepdim=True)",
        test=WALK,
    ),
    Mutant(
        name="the drafts are emitted, not what was drawn",
        file=TREE,
        old="token = drawn.gather(1, node)\n",
        new="token = drawn.gather(1, node)\n        drawn = tree.tokens\n",
        test=WALK,
    ),
    Mutant(
        name="the deepest node is not reached",
        file=TREE,
        old="for _ in range(tree.max_depth + 1):",
        new="for _ in range(tree.max_depth):",
        test=WALK,
    ),
]
