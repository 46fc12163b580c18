"""What follows a captured step, as graphs: taking it in, drawing a draft, computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hiserve.core.drafts import DraftStep, DraftWork, Proposer
from hiserve.runners.capture import Capture, Graph
from hiserve.runners.inputs import StepInputs

# Drafts that are computed before anything is captured.
NUM_REHEARSED = 2


@dataclass(frozen=True, slots=True, eq=False)
class SharedDraftGraphs:
    """Graphs of what follows every step of a number of rows, however many tokens it computed of each.

    Attributes:
        draft_work: Whose work they are.
        draws: From logits to drafts: the likeliest tokens, or drawn ones, by whether they are the likeliest.
        extend: From a draft to the next one's logits; None where there is never a second.
    """

    draft_work: DraftWork
    draws: dict[bool, Graph]
    extend: Graph | None

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All of them."""
        return (*self.draws.values(), *(() if self.extend is None else (self.extend,)))


@dataclass(frozen=True, slots=True, eq=False)
class DraftGraphs:
    """Graphs of what follows steps of one shape, and what they read and write.

    Attributes:
        works: What the first ones hold, and the tensors that they read.
        first: int64 ``[rows]``, written by the first ones.
        prepare: From the step to the first draft's logits.
        update_only: Instead, where no draft is wanted.
        shared: Shared with steps of as many rows.
    """

    works: tuple[Callable[[], None], ...]
    first: Tensor
    prepare: Graph
    update_only: Graph
    shared: SharedDraftGraphs

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All of them."""
        return (self.prepare, self.update_only, *self.shared.graphs)

    def propose(self, num_draft: int, *, is_greedy: bool) -> None:
        """Replays them on the current stream, behind a step of this shape."""
        if not num_draft:
            self.update_only.replay()
            return
        self.prepare.replay()
        for index in range(num_draft):
            if index:
                assert self.shared.extend is not None, f"{num_draft} drafts, and no graph of a second"
                self.shared.extend.replay()
            self.shared.draws[is_greedy].replay()


class DraftCapture:
    """Captures what a proposer does behind captured steps.

    Steps of as many rows share all graphs but the first, and so the memory of their logits.

    Args:
        proposer: Drafts.
        capture: Where graphs are captured.
        max_draft: Drafts behind a step, at most.
    """

    def __init__(self, proposer: Proposer, capture: Capture, max_draft: int) -> None:
        self._proposer = proposer
        self._capture = capture
        self._max_draft = max_draft
        self._further: dict[int, SharedDraftGraphs] = {}

    def clear(self) -> None:
        """Gives what is shared back, once nobody has it."""
        self._further.clear()

    def behind(self, inputs: StepInputs, hidden_states: Tensor | None) -> DraftGraphs | None:
        """Captures what follows a captured step, under the capture's stream; None where it is no work for graphs.

        Args:
            inputs: Of the step: each of its rows computes as many tokens, and samples.
            hidden_states: What the model shows of them.

        Raises:
            RuntimeError: Something cannot be captured, or a replay differs from the eager step.
        """
        forward, width, num_rows = inputs.forward, inputs.width, inputs.rows.shape[0]
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
            hidden_states=hidden_states,
        )
        further = self._further.get(num_rows)
        draft_work = self._proposer.draft_work(num_rows) if further is None else further.draft_work
        works = None if draft_work is None else draft_work.prepare(step)
        if draft_work is None or works is None:
            return None

        def behind(work: Callable[[], None]) -> None:
            torch.sub(forward.kv_lens, width, out=first)
            work()

        follow, keep = (partial(behind, work) for work in works)
        keep()
        follow()
        if further is None:
            further = self._capture_shared(draft_work)
        graphs = self._capture.record(follow), self._capture.record(keep)
        _check(follow, graphs[0], draft_work)
        if num_rows not in self._further and further.extend is not None:
            _check(draft_work.extend, further.extend, draft_work)
        self._further[num_rows] = further
        return DraftGraphs(works, first, *graphs, further)

    def _capture_shared(self, draft_work: DraftWork) -> SharedDraftGraphs:
        """Draws and computes drafts behind a step that was taken in, and captures that."""
        draws = {is_greedy: partial(draft_work.draw, is_greedy=is_greedy) for is_greedy in (True, False)}
        assert len(draws) == NUM_REHEARSED, "a place of each row for each draw"
        for draw in draws.values():
            draw()
            draft_work.extend()
        return SharedDraftGraphs(
            draft_work=draft_work,
            draws={way: self._capture.record(draw) for way, draw in draws.items() if self._max_draft > 0},
            extend=self._capture.record(draft_work.extend) if self._max_draft > 1 else None,
        )


def _check(work: Callable[[], None], graph: Graph, draft_work: DraftWork) -> None:
    """Runs work, and its graph on what it began with: both must give the same.

    Raises:
        RuntimeError: They do not.
    """
    before = [each.clone() for each in draft_work.results]
    work()
    expected = [each.clone() for each in draft_work.results]
    for each, was in zip(draft_work.results, before, strict=True):
        each.copy_(was)
    graph.replay()
    if not all(torch.equal(ours, theirs) for ours, theirs in zip(draft_work.results, expected, strict=True)):
        raise RuntimeError("the replay of its drafts differs from the eager step")
