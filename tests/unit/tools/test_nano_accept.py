"""Offline prediction of acceptance: it equals a server's cycles, and counts the ends of answers as it says."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.tools.head_oracle import HeadOracle
from tests.unit.tools.tiny_heads import ASSISTANT, CONFIG, END, tiny_corpus, tiny_ids, tiny_target
from tools.nano.accept import Reply, agreements, answer, figures, prompts_of, summary, walk
from tools.nano.generate import continuations
from tools.nano.head_files import published
from tools.nano.heads import HEADS, Head, Seen, observe
from tools.nano.model import Nano
from tools.nano.train_heads import chain_losses


def half_trained(kind: str, target: Nano, ids: torch.Tensor) -> Head:
    """A head that is right now and then."""
    torch.manual_seed(5)
    head = HEADS[kind](target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(25):
        losses, _ = chain_losses(head, target, ids, 3, 0, ids.shape[1] - 3)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    return head.eval()


def serve(kind: str, head: Head, target: Nano, reply: Reply, num_drafts: int) -> list[tuple[int, int]]:
    """Accepted and emitted tokens of each cycle of a naive server that drafts from its own drafts."""
    oracle = HeadOracle(kind, published(head, CONFIG, torch.float64), CONFIG, target.embed_tokens.weight)
    ids, row, cycles = torch.from_numpy(reply.ids), reply.num_prompt - 1, []
    while row + 2 < len(ids):
        known = ids[: row + 2]
        seen = observe(target, known[None])
        with torch.no_grad():
            logits = oracle.chain(
                known, Seen(seen.aux[0], seen.last[0]), row, num_drafts, lambda d: int(d[-1].argmax())
            )
        truth = ids[row + 2 : row + 2 + num_drafts].tolist()
        accepted = 0
        for draft, token in zip(logits.argmax(-1).tolist(), truth, strict=False):
            if draft != token:
                break
            accepted += 1
        emitted = min(accepted + 1, len(ids) - row - 2)
        cycles.append((accepted, emitted))
        row += emitted
    return cycles


def test_predicted_cycles_equal_those_of_a_server_that_drafts_from_its_own_drafts() -> None:
    target = tiny_target(seed=1)
    prompts = [row.numpy() for row in (tiny_ids(2, 4), tiny_ids(3, 6))]
    replies = answer(target, prompts, max_tokens=11, batch=2)
    lengths = min(len(reply.ids) for reply in replies)
    text = torch.stack([torch.from_numpy(reply.ids[:lengths]) for reply in replies])
    for kind in HEADS:
        head = half_trained(kind, target, text)
        tables = agreements(head, target, replies, 3, batch=2)
        accepted = 0
        for reply, table in zip(replies, tables, strict=True):
            for num_drafts in (1, 3):
                cycles = walk(table, num_drafts)
                assert [(c.accepted, c.emitted) for c in cycles] == serve(kind, head, target, reply, num_drafts)
                accepted += sum(c.accepted for c in cycles)
        assert 0 < accepted < sum(reply.num_answer for reply in replies) * 2


def test_a_random_head_is_hardly_ever_right() -> None:
    target = tiny_target(seed=1)
    replies = {"coffee": answer(target, [tiny_ids(s, 8).numpy() for s in range(4)], 20, 4)}
    torch.manual_seed(6)
    assert figures(HEADS["mtp"](target), target, replies)["coffee"]["k1"]["accept_length"] < 1.3


def test_cycles_advance_by_what_they_emit_and_stop_where_the_answer_ends() -> None:
    right = np.asarray([[1, 1], [0, 1], [0, 0], [1, 0], [1, 1], [0, 1], [0, 0]], dtype=bool)
    cycles = walk(right, 2)
    assert [(c.accepted, c.emitted, c.is_whole) for c in cycles] == [(2, 3, True), (1, 2, True), (0, 1, False)]
    found = summary([right, np.zeros((1, 2), dtype=bool)], 2)
    assert found["whole_accept_length"] == 2.5
    assert found["accept_length"] == 2.0
    assert found["accepted_per_position"] == [1.0, 0.5]
    assert (found["cycles"], found["whole_cycles"]) == (3, 2)


def test_a_cycle_is_whole_when_one_more_token_than_drafts_is_left() -> None:
    assert [cycle.is_whole for cycle in walk(np.zeros((5, 3), dtype=bool), 3)] == [True, False, False, False]


def test_answers_shorter_than_a_cycle_give_no_acceptance() -> None:
    found = summary([np.zeros((1, 3), dtype=bool)], 3)
    assert (found["accept_length"], found["whole_accept_length"], found["cycles"]) == (None, None, 0)


def test_greedy_continuations_of_ragged_prompts_equal_the_uncached_model() -> None:
    target, lengths = tiny_target(seed=1), torch.tensor([3, 9, 6])
    prompts = tiny_ids(7, 3, 9)
    out = continuations(target, prompts, lengths, 8, torch.zeros(3))
    for row, length in zip(out, lengths.tolist(), strict=True):
        choice = target.logits(target(row[None, : length + 8])).argmax(-1)[0]
        assert torch.equal(choice[length - 1 : length + 7], row[length : length + 8])
    assert torch.equal(out[1, :9], prompts[1])


def test_continuations_follow_the_targets_distribution() -> None:
    target, prompt = tiny_target(seed=1), tiny_ids(8, 1, 5)
    torch.manual_seed(9)
    num_rows = 4000
    drawn = continuations(
        target, prompt.expand(num_rows, -1), torch.full((num_rows,), 5), 1, torch.full((num_rows,), 1.5)
    )
    expected = (target.logits(target(prompt))[0, -1] / 1.5).softmax(-1)
    frequency = torch.bincount(drawn[:, 5], minlength=CONFIG.vocab_size) / num_rows
    assert (frequency - expected).abs().max() < 5 * (0.25 / num_rows) ** 0.5


def test_answers_end_with_the_end_token_or_at_their_limit() -> None:
    target = tiny_target(seed=1)
    target.embed_tokens.weight[END] *= 3
    replies = answer(target, [tiny_ids(s, 8).numpy() for s in range(6)], 12, 4)
    for reply in replies:
        own = reply.ids[reply.num_prompt :]
        assert END not in own[:-1]
        assert own[-1] == END or len(own) == 12
    assert any(reply.ids[-1] == END for reply in replies)


def test_prompts_stop_at_an_assistants_turn_and_may_stand_behind_other_dialogues() -> None:
    corpus = tiny_corpus(seed=1)
    prompts = prompts_of(corpus, "report", "services", limit=4)
    assert len(prompts) == 4
    assert all(prompt[-1] == ASSISTANT for prompt in prompts)
    behind = prompts_of(corpus, "report", "services", limit=4, context=20)
    assert all(np.array_equal(long[20:], short) for long, short in zip(behind, prompts, strict=True))
