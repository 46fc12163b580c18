"""Drafts behind captured steps, recorded and played on the CPU: they are those of eager steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hiserve import SamplingParams
from hiserve.core.forward import ForwardInputs
from hiserve.runners.draft_graphs import DraftCapture
from hiserve.runners.graph import GraphRunner
from hiserve.spec.head import HeadProposer
from tests.helpers.cache_paths import pool
from tests.helpers.dialogues import trained
from tests.helpers.drafted import Draft, Drafted
from tests.helpers.recorded import RecordableAttention, RecordedCapture, recordable_ops
from tests.helpers.small_model import small_model
from tests.helpers.widening import some

STEPS, NUM_NEW, BUCKETS = 3, 13, (1, 4)
PROMPTS = ["Two cappuccinos, please.", "Find me a cheap hotel in Boston.", "Book a table."]
SAMPLING = (
    SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_NEW, ignore_eos=True),
)


@pytest.fixture(scope="module")
def specs() -> dict[str, str]:
    torch.set_num_threads(1)
    return {kind: trained(kind, small_model()) for kind in ("draft_model", "eagle3", "mtp")}


def drafted(spec: str, page_size: int = 16) -> Drafted:
    settings: dict[str, Any] = {"host_cache_gib": 0, "attention_backend": "reference", "disable_prefix_cache": True}
    return Drafted(model=small_model(), spec=spec, spec_steps=STEPS, **pool(page_size), **settings)


def with_graphs(subject: Drafted, max_draft: int = STEPS, capture: RecordedCapture | None = None) -> RecordedCapture:
    """Records steps of one token a row, and of all drafts."""
    dispatch, rows = subject.executor._runners, subject.executor._rows
    eager, proposer = dispatch._eager, dispatch._proposer
    rows.ops = proposer._draw_ops = recordable_ops()
    proposer._attention = RecordableAttention(proposer._attention)
    attention, capture = RecordableAttention(eager._attention), capture or RecordedCapture()
    drafts = DraftCapture(proposer, capture, range(1 + max_draft))  # type: ignore[arg-type]
    dispatch._full = {
        width: GraphRunner(
            eager._model,
            eager._layers,
            attention,
            rows,
            capture,  # type: ignore[arg-type]
            width=width,
            max_len=rows.max_len,
            buckets=BUCKETS,
            drafts=drafts,
        )
        for width in (1, 1 + STEPS)
    }
    dispatch.capture()
    return capture


@pytest.mark.parametrize("kind", some(["draft_model", "eagle3", "mtp"], "draft_model", "mtp"))
def test_drafts_behind_graphs_are_those_of_eager_steps(specs: dict[str, str], kind: str) -> None:
    graphs, eager = drafted(specs[kind]), drafted(specs[kind])
    with_graphs(graphs)
    with graphs.llm, eager.llm:
        for sampling in SAMPLING:
            said = [
                [each.outputs[0].token_ids for each in run.llm.generate(PROMPTS, sampling)] for run in (graphs, eager)
            ]
            assert said[0] == said[1]
    assert graphs.drafts == eager.drafts
    assert not graphs.executor._rows.tokens[0].any()  # of what pads a batch: drafts that nobody checks stand nowhere
    num_prompts = len(SAMPLING)
    assert (graphs.num_replayed, eager.num_replayed) == (len(graphs.drafts) - num_prompts, 0)
    assert len({token for step in graphs.drafts for draft in step.values() for token in draft.tokens}) >= 10


@pytest.mark.parametrize("kind", some(["draft_model", "eagle3", "mtp"], "eagle3"))
def test_steps_behind_which_nothing_is_drafted_leave_what_later_drafts_need(
    specs: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs, without, and by the work that would be ready for drafts, which are drawn behind every third step."""

    def run(*, has_graphs: bool) -> list[dict[int, Draft]]:
        subject = drafted(specs[kind])
        if has_graphs:
            with_graphs(subject)
        choice, turns = subject.planner._drafting, itertools.count()
        always = choice.propose

        def seldom(rows: Any, **options: Any) -> int:
            if next(turns) % 3 != 2:
                choice._rows.drafted[rows] = 0
                return 0
            return int(always(rows, **options))

        choice.propose = seldom
        with subject.llm as llm:
            llm.generate(PROMPTS, SAMPLING[0])
        return [step for step in subject.drafts if any(draft.tokens for draft in step.values())]

    with_pieces, eager = run(has_graphs=True), run(has_graphs=False)
    with monkeypatch.context() as patch:
        patch.setattr(HeadProposer, "update_only", HeadProposer.prepare)
        ready = run(has_graphs=False)
    assert with_pieces == eager == ready
    assert len({token for step in eager for draft in step.values() for token in draft.tokens}) >= 10


@pytest.mark.parametrize(("max_draft", "num_further"), [(0, 0), (1, 2), (STEPS, 3)])
def test_what_follows_steps_of_all_widths_is_captured_once_and_only_if_it_may_be_replayed(
    specs: dict[str, str], max_draft: int, num_further: int
) -> None:
    subject = drafted(specs["eagle3"])
    capture = with_graphs(subject, max_draft)
    # Of each width the forward, what draws behind it, in two ways, and what takes the step in, in two ways.
    assert len(capture.graphs) == len(BUCKETS) * (2 * (1 + 2 + 2) + num_further)
    dispatch = subject.executor._runners
    assert dispatch.num_nodes == sum(graph.num_nodes for graph in capture.graphs)
    with subject.llm:
        pass
    assert not capture.graphs


@pytest.mark.parametrize(("kind", "page_size"), [("eagle3", 3), ("draft_model", 1)])
def test_no_two_tokens_of_a_row_are_stored_in_one_place_while_replays_are_compared(
    specs: dict[str, str], kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which of them a device would keep."""
    subject, capture = drafted(specs[kind], page_size), RecordedCapture()
    dispatch, widths = subject.executor._runners, set()
    for model in (dispatch._eager._model, dispatch._proposer._head):

        def watch(inputs: ForwardInputs, *others: Any, forward: Any = model.forward) -> Any:
            for slots in inputs.slots.view(len(inputs.q_lens), -1):
                # What is captured does not run on a device.
                assert capture.is_active or slots.unique().shape == slots.shape, slots
                widths.add(slots.shape[0])
            return forward(inputs, *others)

        monkeypatch.setattr(model, "forward", watch)
    with_graphs(subject, capture=capture)
    monkeypatch.undo()
    assert widths == {1, 2, 4, 5}
    rows = subject.executor._rows
    assert not rows.known_len.any() and not rows.tokens.any() and not rows.page_table.any()
    assert (rows.page_owner[1:] == -1).all() and (rows.entry_owner == -1).all()
    with subject.llm as llm:
        said = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, SAMPLING[1])]
    assert subject.num_replayed
    with drafted(specs[kind], 16).llm as llm:
        assert said == [each.outputs[0].token_ids for each in llm.generate(PROMPTS, SAMPLING[1])]
