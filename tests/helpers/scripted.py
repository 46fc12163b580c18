"""A proposer that knows the answer: drafts are what plain decoding gave, with every third one spoiled."""

from __future__ import annotations

from pathlib import Path

import torch

from hiserve.core.request import SamplingParams
from tests.helpers.cuda import decisions, fill_freed_memory, generate, graph_engine, poison, prompts_of, wait_for_stream
from tests.helpers.models import Engine
from tests.helpers.plans import GREEDY, HandPlanner

VOCAB = 300  # spoiled drafts lie below
LENGTHS = [39, 3, 41, 200, 80, 17, 64]  # of prompts
NUM_NEW, WIDTH = 40, 4


def verify(
    subject: Engine,
    prompts: dict[int, list[int]],
    expected: dict[int, list[int]],
    width: int,
    sampling: SamplingParams = GREEDY,
) -> dict[int, list[int]]:
    """Decodes with ``width - 1`` drafts a step, written behind what the rows know; returns as many tokens as expected."""
    planner = HandPlanner(subject.rows.page_size, subject.rows.num_pages)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    result = subject.executor.submit(planner.step({row: len(prompt) for row, prompt in prompts.items()})).result()
    out = {row: [token] for row, token in zip(prompts, result.tokens[:, 0].tolist(), strict=True)}
    num_accepted = num_spoiled = 0
    while any(len(out[row]) < len(expected[row]) for row in prompts):
        for row, known in out.items():
            drafts = expected[row][len(known) : len(known) + width - 1]
            drafts += [0] * (width - 1 - len(drafts))  # rows that are ahead of the others go on
            if len(known) % 3 == 0:
                drafts[-1], num_spoiled = (drafts[-1] + 1) % VOCAB, num_spoiled + 1
            start = len(prompts[row]) + len(known)
            written = torch.tensor(drafts, dtype=torch.int32, device=subject.rows.device)
            subject.rows.tokens[row, start : start + width - 1] = written
        wait_for_stream()
        plan = planner.draft_step(dict.fromkeys(prompts, width - 1))
        result = subject.executor.submit(plan).result()
        assert result.faults.size == 0
        for row, count, tokens in zip(plan.rows.tolist(), result.counts.tolist(), result.tokens.tolist(), strict=True):
            out[row] += tokens[:count]
            num_accepted += count - 1
            planner.settle(row, count)
    assert num_accepted and num_spoiled, f"{num_accepted} accepted, {num_spoiled} spoiled"
    return {row: tokens[: len(expected[row])] for row, tokens in out.items()}


def decode(
    subject: Engine, prompts: dict[int, list[int]], num_new: int, sampling: SamplingParams = GREEDY
) -> dict[int, list[int]]:
    """Decodes without drafts."""
    planner = HandPlanner(subject.rows.page_size, subject.rows.num_pages)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    plans = [planner.step({row: len(prompt) for row, prompt in prompts.items()})]
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(num_new - 1)]
    steps = [subject.executor.submit(plan).result().tokens[:, 0].tolist() for plan in plans]
    return {row: [step[index] for step in steps] for index, row in enumerate(prompts)}


def check_graphs(folder: Path) -> dict[str, int]:
    """Decodes and verifies over garbage, without graphs and with all of them; returns the gate's decisions with graphs.

    Tokens are those of float64 on the device, without graphs. The model has 320 tokens.
    """
    prompts = prompts_of(LENGTHS, seed=8, vocab=320)
    reference = graph_engine(folder, "off", "float64", attention="reference")
    expected = generate(reference, prompts, NUM_NEW)
    reference.executor.close()
    counts: dict[str, int] = {}
    for graphs in ("off", "all"):
        subject = graph_engine(folder, graphs, "float32", widths=(1, WIDTH) if graphs == "all" else (1,))
        if graphs == "all":
            fill_freed_memory(subject)
            poison(subject)
        for _ in range(2):  # over rows that others had
            assert generate(subject, prompts, NUM_NEW) == expected, graphs
        assert verify(subject, prompts, expected, WIDTH) == expected, graphs
        counts = decisions(subject)
        subject.executor.close()
    assert len({token for tokens in expected.values() for token in tokens}) >= 20
    assert counts["replay/decode"] == 2 * (NUM_NEW - 1)
    assert counts["replay/verify"] >= NUM_NEW // WIDTH
    assert "eager/capture_failed" not in counts
    return counts
