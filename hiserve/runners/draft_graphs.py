"""A proposer's work after captured steps, as graphs; ``core.drafts.propose`` does the same op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftStep, Proposer
from hiserve.kernels.step_ops import StepInputs
from hiserve.runners.capture import Capture, Graph

# Drafts of a chain that are computed before anything is captured: one for each way of drawing.
NUM_WARMUP_DRAFTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraphs:
    """Graphs of a proposer's work after steps of one shape."""

    works: tuple[Callable[[], None], ...]  # captured in the first two; they keep alive the tensors that these read
    prepare: Graph  # from the step to the logits of the first draft
    update_only: Graph  # instead, where no draft is wanted
    chain: DraftChain  # the rows that get drafts; steps of as many rows share it, and the graphs that follow
    # From logits to a draft of a chain, or all of a tree: the likeliest tokens, or drawn ones, by whether they are the likeliest.
    draws: dict[tuple[TreeShape | None, bool], Graph]
    extend: Graph | None  # from a draft to the next one's logits; None where there is never a second
    tree_of: Callable[[int], TreeShape | None]  # as ``Proposer.tree_of``

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All of them."""
        return (
            self.prepare,
            self.update_only,
            *self.draws.values(),
            *(() if self.extend is None else (self.extend,)),
        )

    def propose(self, num_draft: int, *, is_greedy: bool) -> None:
        """Replays them on the current stream, after a step of this shape."""
        if not num_draft:
            self.update_only.replay()
            return
        self.prepare.replay()
        tree = self.tree_of(num_draft)
        for index in range(num_draft if tree is None else 1):
            if index:
                assert self.extend is not None, f"{num_draft} drafts, and no graph of a second"
                self.extend.replay()
            self.draws[tree, is_greedy].replay()


class DraftCapture:
    """Captures a proposer's work after captured steps.

    Steps of equally many rows share all graphs but the first two, and so the memory of their logits.

    Args:
        num_drafts: Each number of drafts that there may be after a step.
    """

    def __init__(self, proposer: Proposer, capture: Capture, num_drafts: Sequence[int]) -> None:
        self._proposer = proposer
        self._capture = capture
        trees = {num_draft: proposer.tree_of(num_draft) for num_draft in num_drafts if num_draft}
        self._trees = [tree for tree in trees.values() if tree is not None]
        self._longest_chain = max((num_draft for num_draft, tree in trees.items() if tree is None), default=0)
        self._first: dict[int, DraftGraphs] = {}  # captured for each number of rows

    def clear(self) -> None:
        """Frees the shared graphs, once no runner holds them."""
        self._first.clear()

    def after(self, inputs: StepInputs, hidden_states: Tensor | None) -> DraftGraphs | None:
        """Captures the work after a captured step, on the capture's stream; None where graphs cannot hold it.

        Args:
            inputs: Of the step: each of its rows computes as many tokens, and samples.
            hidden_states: The model's, of ``Proposer.aux_layers``; None without such layers.

        Raises:
            RuntimeError: Something cannot be captured, or a replay differs from the eager step.
        """
        forward, width, num_rows = inputs.forward, inputs.width, inputs.rows.shape[0]
        proposer, path = self._proposer, inputs.path
        num_kept = width if path is None else min(width, path.shape[1])  # tokens of a row
        if not proposer.is_capturable(num_rows, num_kept):
            return None
        first, kept = forward.kv_lens - width, hidden_states
        if path is not None and hidden_states is not None:
            kept = hidden_states.new_zeros((num_rows * num_kept, hidden_states.shape[1]))
        step = DraftStep(
            rows=inputs.rows,
            first=first,
            legal=inputs.legal,
            sampling=inputs.sampling,
            q_lens=np.full_like(forward.q_lens, num_kept),
            kv_bounds=forward.kv_bounds,
            num_draft=1,
            is_greedy=False,
            hidden_states=kept,
            is_static=True,
        )
        shared = self._first.get(num_rows)
        proposer.update_only(step)
        made = _prepared(proposer, step)
        chain = made if shared is None else shared.chain

        def after_step(work: Callable[[], None]) -> None:
            torch.sub(forward.kv_lens, width, out=first)
            if path is not None and hidden_states is not None and kept is not None:
                places = forward.qo_indptr[:-1, None] + path[:, :num_kept]
                torch.index_select(hidden_states, 0, places.flatten(), out=kept)
            work()

        prepare = partial(after_step, partial(_prepare_into, chain, proposer, step))
        update_only = partial(after_step, partial(proposer.update_only, step))
        update_only()
        prepare()
        draws, extend = self._capture_shared(chain) if shared is None else (shared.draws, shared.extend)
        graphs = self._capture.record(prepare), self._capture.record(update_only)
        _check(prepare, graphs[0], chain)
        if shared is None and extend is not None:
            _check(partial(proposer.extend, chain), extend, chain)
        captured = DraftGraphs((prepare, update_only), *graphs, chain, draws, extend, proposer.tree_of)
        self._first.setdefault(num_rows, captured)
        return captured

    def _capture_shared(self, chain: DraftChain) -> tuple[dict[tuple[TreeShape | None, bool], Graph], Graph | None]:
        """Draws and extends drafts after ``prepare``, and captures both."""
        proposer, ways = self._proposer, (True, False)
        extend = partial(proposer.extend, chain)
        # Trees first: they are written from the place of the first draft, where drafts of chains move on.
        shapes = [*self._trees, *([None] if self._longest_chain else [])]
        draws = {(tree, way): partial(proposer.draft, chain, tree, is_greedy=way) for tree in shapes for way in ways}
        for (tree, _), draw in draws.items():
            draw()
            if tree is None:
                extend()
        return (
            {which: self._capture.record(draw) for which, draw in draws.items()},
            self._capture.record(extend) if self._longest_chain > 1 else None,
        )


def _prepared(proposer: Proposer, step: DraftStep) -> DraftChain:
    chain = proposer.prepare(step)
    assert chain is not None, "every row of a static step samples"
    return chain


def _prepare_into(chain: DraftChain, proposer: Proposer, step: DraftStep) -> None:
    made = _prepared(proposer, step)
    for ours, theirs in zip(chain.tensors, made.tensors, strict=True):
        ours.copy_(theirs)


def _check(work: Callable[[], None], graph: Graph, chain: DraftChain) -> None:
    """Runs work, and its graph on the same tensors: the results must be equal.

    Raises:
        RuntimeError: They do not.
    """
    before = [each.clone() for each in chain.tensors]
    work()
    expected = [each.clone() for each in chain.tensors]
    for each, was in zip(chain.tensors, before, strict=True):
        each.copy_(was)
    graph.replay()
    if not all(torch.equal(ours, theirs) for ours, theirs in zip(chain.tensors, expected, strict=True)):
        raise RuntimeError("the replay of its drafts differs from the eager step")
