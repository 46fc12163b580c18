"""N-gram drafts that search the replies before, against those that search their request alone, in recorded agent sessions.

Usage: ``python -m benchmarks.reply_drafts --data FOLDER [--steps 5]``; the folder has ``agent_*.jsonl.gz``, of LMCache's agent
traces (Apache-2.0). The held-out sessions of each recording are answered in the order of their times, and are one tenant's. A
step appends the accepted drafts and one token, as recorded; continuations are searched with the tokens that the planner knows:
those before the step in flight with depth 0, and before two with depth 1. ``longest`` finds every agreement of up to 16 tokens, as
a suffix automaton would. Then the CPU time of the planning thread: of continuations, for a row of a step, and of keeping a reply,
for a token. Bars: 1.3 x the accepted drafts of a step, 30 us a row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.planner import decoding_planner, steps
from benchmarks.record import RESULTS, Record, judge
from hiserve.bench.datasets.recorded import read_rows
from hiserve.core.drafts import DraftStep
from hiserve.core.plan import Int32Array
from hiserve.kernels import draft_reference
from hiserve.kernels.step_ops import RowTensors
from hiserve.models.model_config import NANO, find_model
from hiserve.spec.history import LONGEST, ReplyHistory
from hiserve.spec.ngram import NgramProposer

MEASURED = (
    "hiserve/spec",
    "hiserve/engine/drafting.py",
    "hiserve/kernels/draft_reference.py",
    "benchmarks/reply_drafts.py",
)
HELD_OUT = "0123"  # last digits of sessions that nothing was chosen by
RECORDINGS = ("miniswe", "magagent", "taubench")
TENANT = b"agents"
DEFAULT_TOKENS = 65_536
GAIN_BAR, ROW_BAR_US = 1.3, 30.0
TIMED_ROWS, TIMED_STEPS = (1, 8, 32, 128), 300


class Kept(Protocol):
    """What ``ReplyHistory`` does here."""

    def add(self, tenant: bytes, tokens: Int32Array, num_prompt: int) -> None:
        """Keeps a reply."""

    def follow(self, tenants: Sequence[bytes], last: Int32Array, num_following: int) -> tuple[Any, Int32Array]:
        """Finds where most tokens agree."""


class LongestHistory:
    """Finds the longest agreement of up to ``LONGEST`` tokens, and of equals the latest; memory without bound."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def add(self, tenant: bytes, tokens: Int32Array, num_prompt: int) -> None:
        begin = len(self._text)
        self._text += tokens[max(0, num_prompt - LONGEST) :].tolist()
        for place in range(begin + 1, len(self._text)):
            for size in range(1, min(LONGEST, place - begin) + 1):
                self._places[tuple(self._text[place - size : place])] = place

    def follow(self, tenants: Sequence[bytes], last: Int32Array, num_following: int) -> tuple[Any, Int32Array]:
        (text,) = last[:, LONGEST - 1 :: -1].tolist()
        for size in range(LONGEST, 0, -1):
            place = self._places.get(tuple(text[-size:]))
            if place is not None:
                following = self._text[place : place + num_following]
                following += [0] * (num_following - len(following))
                return np.array([size]), np.array([following], dtype=np.int32)
        return np.array([0]), np.zeros((1, num_following), dtype=np.int32)


@dataclass(frozen=True)
class Reply:
    """A recorded request: int32 tokens of its prompt and reply."""

    tokens: Int32Array
    num_prompt: int


def read(path: Path, tokenizer: Tokenizer) -> list[Reply]:
    """Returns the held-out requests with a reply, by time."""
    found = []
    for row in read_rows(path, None)[0]:
        if row.session_id[-1] in HELD_OUT and row.output:
            prompt, reply = (tokenizer.encode(text).ids for text in (row.input, row.output))
            found.append(Reply(np.array([*prompt, *reply], dtype=np.int32), len(prompt)))
    return found


def answer(reply: Reply, history: Kept | None, depth: int, num_draft: int) -> tuple[int, int]:
    """Returns the verifying steps of a reply, and the drafts that they accepted."""
    text, end = reply.tokens, reply.tokens.size
    tokens = torch.zeros((2, end + num_draft + 1), dtype=torch.int32)
    known_len = torch.zeros(2, dtype=torch.int64)
    state = RowTensors(tokens, known_len.clone(), known_len, *(torch.zeros((2, 1), dtype=torch.int32),) * 2, tokens[0])
    proposer = NgramProposer(state, draft_reference)
    row, only, legal = torch.tensor([1]), torch.tensor([0]), torch.tensor([True])
    known = reply.num_prompt + 1
    tokens[1, :known] = torch.from_numpy(text[:known])
    lengths = [reply.num_prompt] * (depth + 1)  # that the planner knew when it planned the latest steps
    num_steps = num_accepted = 0
    while known < end:
        known_len[1] = known
        each = np.array([known], dtype=np.int32)
        found = None if history is None else continuation(text[: lengths[0]], known, history, num_draft)
        proposer.prepare(DraftStep(row, known_len[1:], legal, only, each, each, num_draft, True, found))
        drafts = tokens[1, known : min(known + num_draft, end)].numpy()
        accepted = int(np.cumprod(drafts == text[known : known + drafts.size]).sum())
        lengths = [*lengths[1:], known]
        known += accepted + 1
        tokens[1, : min(known, end)] = torch.from_numpy(text[:known])
        num_steps, num_accepted = num_steps + 1, num_accepted + accepted
    return num_steps, num_accepted


def continuation(planned: Int32Array, known: int, history: Kept, num_draft: int) -> torch.Tensor:
    """Returns what a plan says that was made when these tokens were known, for a row that has more by now."""
    last = np.full((1, LONGEST + 1), -1, dtype=np.int32)
    last[0, :LONGEST] = planned[: -LONGEST - 1 : -1] if planned.size >= LONGEST else np.resize(planned[::-1], LONGEST)
    agreed, following = history.follow([TENANT], last, known - planned.size + num_draft)
    return torch.from_numpy(np.concatenate(([[planned.size]], agreed[:, None], following), axis=1).astype(np.int32))


def accepted(replies: list[Reply], history: Kept | None, depth: int, num_draft: int) -> dict[str, Any]:
    """Answers requests one after the other; each may repeat those before."""
    num_steps = num_accepted = 0
    for reply in replies:
        more_steps, more_accepted = answer(reply, history, depth, num_draft)
        num_steps, num_accepted = num_steps + more_steps, num_accepted + more_accepted
        if history is not None:
            history.add(TENANT, reply.tokens, reply.num_prompt)
    return {"steps": num_steps, "accepted": num_accepted, "accepted_per_step": round(num_accepted / num_steps, 3)}


def cases() -> Iterator[tuple[str, int, type[Kept] | None]]:
    yield "request alone", 0, None  # these drafts are the same with every depth
    for depth in (0, 1):
        yield "replies", depth, lambda: ReplyHistory(DEFAULT_TOKENS)  # type: ignore[misc]
    yield "longest", 1, LongestHistory


def timed(num_rows: int, num_draft: int) -> dict[str, Any]:
    """Returns the microseconds of continuations for a row of a step, and of keeping a reply of 1,000 tokens for one of them."""
    rng = np.random.default_rng(0)
    history = ReplyHistory(DEFAULT_TOKENS)
    planner = decoding_planner(num_rows, TIMED_STEPS, rng, has_host=False)
    run = steps(planner, num_rows, rng)
    next(run)
    add_us = []
    for _ in range(2 * DEFAULT_TOKENS // 1000):
        tokens = rng.integers(3, 128_000, 1000 + LONGEST).astype(np.int32)
        begin = time.thread_time_ns()
        history.add(b"", tokens, LONGEST)
        add_us.append((time.thread_time_ns() - begin) / 1e6)
    planner._drafting._history = history
    rows, row_us = planner._rows.active, []
    for _ in range(TIMED_STEPS):
        next(run)
        begin = time.thread_time_ns()
        found = planner._drafting.continuations(rows, num_draft)
        row_us.append((time.thread_time_ns() - begin) / 1e3 / num_rows)
        assert found is not None
    return {
        "rows": num_rows,
        "row_us": [round(each, 2) for each in row_us],
        "kept_token_us": [round(each, 3) for each in add_us],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = Record(
        RESULTS / "reply_drafts.json",
        f"python -m benchmarks.reply_drafts --data FOLDER --steps {given.steps}",
        *MEASURED,
    )
    result |= {
        "num_draft": given.steps,
        "kept_tokens": DEFAULT_TOKENS,
        "tokenizer": NANO,
        "bars": {"gain": GAIN_BAR, "row_us": ROW_BAR_US},
    }
    tokenizer = Tokenizer.from_file(str(find_model(NANO) / "tokenizer.json"))
    found: list[dict[str, Any]] = []
    for name in RECORDINGS:
        replies = read(given.data / f"agent_{name}.jsonl.gz", tokenizer)
        num_tokens = sum(reply.tokens.size - reply.num_prompt for reply in replies)
        for searched, depth, make in cases():
            case = {
                "recording": name,
                "replies": len(replies),
                "tokens": num_tokens,
                "searched": searched,
                "depth": depth,
            }
            found.append(case | accepted(replies, None if make is None else make(), depth, given.steps))
            print(found[-1], flush=True)
    result |= {"acceptance": found, "planning": [timed(num_rows, given.steps) for num_rows in TIMED_ROWS]}
    result["summary"] = summary = summarise(result)
    result.save()
    most = {name: ROW_BAR_US for name in summary if name.startswith("row us")}
    return bool(judge(summary, least={f"gain, depth {depth}": GAIN_BAR for depth in (0, 1)}, most=most))


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """Returns accepted drafts of a step over all recordings, gains over the request alone, and medians of the times."""
    rates = {}
    for searched, depth, _ in cases():
        same = [case for case in result["acceptance"] if (case["searched"], case["depth"]) == (searched, depth)]
        rates[searched, depth] = sum(case["accepted"] for case in same) / sum(case["steps"] for case in same)
    alone = rates["request alone", 0]
    summary = {f"accepted, {searched}, depth {depth}": rate for (searched, depth), rate in rates.items()}
    summary |= {f"gain, depth {depth}": rates["replies", depth] / alone for depth in (0, 1)}
    summary |= {f"gain in tokens, depth {depth}": (1 + rates["replies", depth]) / (1 + alone) for depth in (0, 1)}
    for case in result["planning"]:
        summary[f"row us, {case['rows']} rows"] = float(np.median(case["row_us"]))
    summary["kept token us"] = float(np.median(result["planning"][0]["kept_token_us"]))
    return {name: round(figure, 3) for name, figure in summary.items()}


if __name__ == "__main__":
    raise SystemExit(main())
