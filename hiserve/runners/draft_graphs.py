"""What follows a captured step, as graphs: taking it in, drawing a draft, computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hiserve.core.drafts import DraftPieces, DraftStep, Proposer
from hiserve.runners.capture import Capture, Graph
from hiserve.runners.inputs import StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraphs:
    """Graphs of one number of rows and of tokens each, and what they read and write.

    Attributes:
        pieces: Whose work they are.
        first: int64 ``[rows]``, written by the first graph.
        follow: From the step to the first draft's logits.
        draws: From logits to drafts: the likeliest tokens, or drawn ones, by whether they are the likeliest.
        extend: From a draft to the next one's logits.
    """

    pieces: DraftPieces
    first: Tensor
    follow: Graph
    draws: dict[bool, Graph]
    extend: Graph

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs."""
        return sum(graph.num_nodes for graph in (self.follow, self.extend, *self.draws.values()))

    def propose(self, num_draft: int, *, is_greedy: bool) -> None:
        """Replays them on the current stream, behind a step of this shape."""
        self.follow.replay()
        for index in range(num_draft):
            if index:
                self.extend.replay()
            self.draws[is_greedy].replay()


def capture_drafts(
    proposer: Proposer, inputs: StepInputs, features: Tensor | None, capture: Capture
) -> DraftGraphs | None:
    """Captures what a proposer does behind a captured step; None where it is no work for graphs.

    Args:
        proposer: Drafts.
        inputs: Of the step: each of its rows computes as many tokens, and samples.
        features: What the model shows of them.
        capture: Under whose stream this runs.

    Raises:
        RuntimeError: Something cannot be captured, or a replay differs from the eager step.
    """
    forward, width = inputs.forward, inputs.width
    first = forward.kv_lens - width
    step = DraftStep(
        rows=inputs.rows,
        first=first,
        legal=inputs.legal,
        sampling=inputs.sampling,
        q_lens=forward.q_lens,
        kv_bounds=forward.kv_bounds,
        num_draft=1,
        is_greedy=False,
        features=features,
    )
    pieces = proposer.pieces(step)
    if pieces is None:
        return None

    def follow() -> None:
        torch.sub(forward.kv_lens, width, out=first)
        pieces.follow()

    draws = {is_greedy: partial(pieces.draw, is_greedy=is_greedy) for is_greedy in (True, False)}
    follow()
    for draw in draws.values():
        draw()
    pieces.extend()
    follow_graph = capture.record(follow)
    draw_graphs = {is_greedy: capture.record(draw) for is_greedy, draw in draws.items()}
    extend_graph = capture.record(pieces.extend)
    _check(follow, follow_graph, pieces)
    _check(pieces.extend, extend_graph, pieces)
    return DraftGraphs(pieces, first, follow_graph, draw_graphs, extend_graph)


def _check(work: Callable[[], None], graph: Graph, pieces: DraftPieces) -> None:
    """Runs work, and its graph on what it began with: both must give the same.

    Raises:
        RuntimeError: They do not.
    """
    before = [each.clone() for each in pieces.results]
    work()
    expected = [each.clone() for each in pieces.results]
    for each, was in zip(pieces.results, before, strict=True):
        each.copy_(was)
    graph.replay()
    if not all(torch.equal(ours, theirs) for ours, theirs in zip(pieces.results, expected, strict=True)):
        raise RuntimeError("the replay of its drafts differs from the eager step")
