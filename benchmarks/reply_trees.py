"""What n-gram drafts would gain as trees: several continuations of recorded agent sessions, merged, against one of as many drafts.

Usage: ``python -m benchmarks.reply_trees --data FOLDER [--replies N]``; the folder is that of ``benchmarks.reply_drafts``, and so are the
held-out sessions, answered in the order of their times as one tenant's. Wherever a reply may stand, its continuations are those after
the latest places of its last 1 to 3 tokens in the request, and of its last 2, 4, 8 and 16 in the replies before; most agreeing tokens
come first. A chain follows the first one. A tree gives it ``lead`` nodes, shares the others among continuations that begin with other
tokens, and what is left is the first one's again. ``any`` verifies all continuations whole: no tree of them accepts more.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.record import RESULTS, Record
from benchmarks.reply_drafts import RECORDINGS, Reply, read
from hiserve.models.model_config import NANO, find_model

MOST = 15  # drafts of a step
OWN_SIZES, REPLY_SIZES, PLACES = (3, 2, 1), (16, 8, 4, 2), 3
CHAINS, TREES = (3, 5, 7, 15), tuple((lead, others) for lead in (5, 8, 12) for others in (1, 2, 3))
Places = defaultdict[tuple[int, ...], list[int]]


class Text:
    """Tokens, and the places after their n-grams."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._tokens: list[int] = []
        self._places: Places = defaultdict(list)

    def add(self, tokens: list[int], *, is_new: bool = False) -> None:
        """Appends tokens; n-grams of a new text have none of those before it."""
        begin = len(self._tokens) if is_new else 0
        start = len(self._tokens)
        self._tokens += tokens
        for place in range(max(1, start), len(self._tokens)):
            for size in self._sizes:
                if place - size >= begin:
                    self._places[tuple(self._tokens[place - size : place])].append(place)

    def after(self, last: list[int], *, repeats: bool) -> Iterator[tuple[int, list[int]]]:
        """Yields how many of the last tokens agree, and the tokens that follow there."""
        for size in self._sizes:
            for place in reversed(self._places.get(tuple(last[-size:]), [])[-PLACES:]):
                found = self._tokens[place : place + MOST]
                while found and repeats and len(found) < MOST:
                    found += found[: MOST - len(found)]
                if found:
                    yield size, found


def continuations(reply: Reply, history: Text) -> dict[int, list[list[int]]]:
    """Returns the continuations after each place of a reply, its first token aside."""
    tokens, own = reply.tokens.tolist(), Text(OWN_SIZES)
    own.add(tokens[: reply.num_prompt])
    found = {}
    for known in range(reply.num_prompt + 1, len(tokens)):
        own.add(tokens[known - 1 : known])
        last = tokens[max(0, known - REPLY_SIZES[0]) : known]
        both = [*own.after(last, repeats=True), *history.after(last, repeats=False)]
        by_agreement = [each for _, each in sorted(both, key=lambda each: -each[0])]
        found[known] = [each for at, each in enumerate(by_agreement) if each not in by_agreement[:at]]
    return found


def accepted(drafts: list[int], expected: list[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(drafts, expected, strict=False)) if one != other),
        min(len(drafts), len(expected)),
    )


def accepted_of_tree(found: list[list[int]], expected: list[int], lead: int, num_others: int) -> int:
    others = {each[0]: each for each in reversed(found[1:]) if each[0] != found[0][0]}
    chosen = list(reversed(others.values()))[:num_others]
    share = (MOST - lead) // max(1, len(chosen))
    left = MOST - share * len(chosen)
    return max(accepted(found[0][:left], expected), *(accepted(each[:share], expected) for each in chosen), 0)


def accepted_by(way: str, found: list[list[int]], expected: list[int]) -> int:
    kind, *numbers = way.split()
    if not found:
        return 0
    if kind == "any":
        return max(accepted(each, expected) for each in found)
    if kind == "chain":
        return accepted(found[0][: int(numbers[0])], expected)
    return accepted_of_tree(found, expected, int(numbers[0]), int(numbers[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--replies", type=int, default=10_000, help="of each recording, at most")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(find_model(NANO) / "tokenizer.json"))
    ways = [*(f"chain {number}" for number in CHAINS), *(f"tree {lead} {others}" for lead, others in TREES), "any"]
    counts = {way: [0, 0] for way in ways}
    for name in RECORDINGS:
        history = Text(REPLY_SIZES)
        for reply in read(given.data / f"agent_{name}.jsonl.gz", tokenizer)[: given.replies]:
            tokens, found = reply.tokens.tolist(), continuations(reply, history)
            for way in ways:
                known = reply.num_prompt + 1
                while known < len(tokens):
                    count = accepted_by(way, found[known], tokens[known : known + MOST])
                    known += 1 + count
                    counts[way][0] += 1
                    counts[way][1] += count
            history.add(tokens[max(0, reply.num_prompt - REPLY_SIZES[0]) :], is_new=True)
    command = f"python -m benchmarks.reply_trees --data FOLDER --replies {given.replies}"
    result = Record(RESULTS / "reply_trees.json", command, "benchmarks/reply_trees.py")
    result |= {"drafts": MOST, "replies": given.replies, "recordings": list(RECORDINGS)}
    result["tokens_a_step"] = {way: round(1 + count / steps, 3) for way, (steps, count) in counts.items()}
    for way, tokens_a_step in result["tokens_a_step"].items():
        print(f"{way:<10} {tokens_a_step}")
    result.save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
