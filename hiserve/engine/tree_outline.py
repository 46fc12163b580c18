"""The upper levels of the radix tree, for whoever looks at a running worker: shape and tiers, never tokens."""

from __future__ import annotations

from heapq import nlargest
from operator import attrgetter

from hiserve.cache.index.node import Node
from hiserve.cache.index.radix import RadixTree
from hiserve.cache.index.tiers import STEP_SHIFT
from hiserve.ipc.cache_stats import NodeFacts

MAX_NODES = 64  # of a level
SHOWN_DIGEST_BYTES = 8


def outline(tree: RadixTree, depth: int) -> list[NodeFacts]:
    """Returns the roots and ``depth`` levels below them, parents first; of each level the ``MAX_NODES`` used last."""
    shown: list[NodeFacts] = []
    level = list(tree.roots.values())
    for at in range(depth + 1):
        level = nlargest(MAX_NODES, level, key=attrgetter("last_used"))
        shown += [_facts(node, at) for node in level]
        level = [child for node in level for child in node.children.values()]
    return shown


def _facts(node: Node, depth: int) -> NodeFacts:
    return NodeFacts(
        digest=_name(node),
        parent="" if node.parent is None else _name(node.parent),
        depth=depth,
        num_tokens=len(node.key) // 4,
        state="" if node.is_root else node.state.name,
        num_locks=node.num_locks,
        num_host_locks=node.num_host_locks,
        last_step=node.last_used >> STEP_SHIFT,
        num_children=len(node.children),
    )


def _name(node: Node) -> str:
    return node.digests[-1][:SHOWN_DIGEST_BYTES].hex()
