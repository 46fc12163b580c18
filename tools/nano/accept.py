"""Predicts what drafts of a head are accepted: ``python -m tools.nano.accept --model DIR --head DIR --corpus NPZ``.

The target answers held-out prompts greedily. Over each answer the head is unrolled from every row with the answer's
own tokens, which is what the server computes as long as drafts are accepted; so the cycles of draft and verification
can be walked afterwards, for every number of drafts, exactly as a server at temperature 0 walks them.
"""

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tools.nano.generate import continuations
from tools.nano.head_files import load_head, load_target
from tools.nano.heads import AUX_LAYERS, Eagle3Head, Head, observe, unroll
from tools.nano.model import Nano
from tools.nano.stream import DIALOGUES, Arrays, documents, load_corpus
from tools.nano.tokenizer import END, PAD, ROLE_TOKENS, special_id

NUM_DRAFTS = (1, 3, 5)
SOURCES = ("coffee", "services", "math", "python", "pytask", "tools")
MAX_TEXT_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt and the target's greedy answer.

    Attributes:
        ids: int64 ``[N]``. Both, the answer with its ``<|end|>`` if it came to one.
        num_prompt: Tokens of the prompt.
    """

    ids: np.ndarray
    num_prompt: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Cycle:
    """One verification."""

    accepted: int  # drafts that were right, in [0, k]
    emitted: int  # tokens it added: the accepted ones and the target's own, or fewer where the answer ends
    is_whole: bool  # whether the answer goes on for k + 1 tokens, so that its end cuts nothing off


def prompts_of(corpus: Arrays, part: str, source: str, limit: int, context: int = 0) -> list[np.ndarray]:
    """Prompts from validation documents: everything before an assistant's turn, or the beginning of a text.

    Args:
        corpus: The packed corpus.
        part: ``early`` or ``report``.
        source: Which documents.
        limit: Prompts at most; of more, evenly spaced ones are taken.
        context: Tokens of other dialogues (of the early-stopping halves) that stand before each prompt.
    """
    others = np.concatenate([ids for _, ids in documents(corpus, "early", DIALOGUES)])
    prompts = []
    for _, ids in documents(corpus, part, (source,)):
        turns = np.flatnonzero(ids == special_id(ROLE_TOKENS["assistant"])) + 1
        prompts += [ids[:cut] for cut in (turns if len(turns) else [max(1, min(len(ids) // 2, MAX_TEXT_PROMPT))])]
    chosen = np.unique(np.linspace(0, len(prompts) - 1, min(limit, len(prompts))).round().astype(int))
    starts = np.linspace(0, len(others) - context, len(chosen)).astype(int)
    return [np.concatenate([others[at : at + context], prompts[i]]) for i, at in zip(chosen, starts, strict=True)]


def padded(rows: list[np.ndarray], length: int, device: torch.device) -> torch.Tensor:
    """Rows padded on the right, int64 ``[B, length]``."""
    ids = np.full((len(rows), length), special_id(PAD), dtype=np.int64)
    for row, content in zip(ids, rows, strict=True):
        row[: len(content)] = content
    return torch.from_numpy(ids).to(device)


def answer(target: Nano, prompts: list[np.ndarray], max_tokens: int, batch: int) -> list[Reply]:
    """Greedy answers of up to ``max_tokens`` tokens, in order of the prompts' lengths."""
    replies, device = [], target.embed_tokens.weight.device
    prompts = sorted(prompts, key=len)
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        lengths = torch.tensor([len(prompt) for prompt in some], device=device)
        ids = padded(some, int(lengths.max()), device)
        greedy = torch.zeros(len(some), device=device)
        out = continuations(target, ids, lengths, max_tokens, greedy, special_id(END)).cpu().numpy()
        for row, prompt in zip(out, some, strict=True):
            own = row[len(prompt) : len(prompt) + max_tokens]
            ends = np.flatnonzero(own == special_id(END))
            num_answer = int(ends[0]) + 1 if len(ends) else max_tokens
            replies.append(Reply(row[: len(prompt) + num_answer].copy(), len(prompt)))
    return replies


@torch.no_grad()
def agreements(head: Head, target: Nano, replies: list[Reply], num_drafts: int, batch: int) -> list[np.ndarray]:
    """Whether drafts are right.

    Args:
        head: The head.
        target: Its target.
        replies: Answers; those of neighbouring lengths are computed together.
        num_drafts: Drafts of a chain.
        batch: Answers computed together.

    Returns:
        For each reply bool ``[num_answer, num_drafts]``: a chain that starts when the answer's token r is the last
        one known proposes the tokens r + 1, r + 2, …; what lies beyond the answer means nothing.
    """
    embedding, found = target.embed_tokens.weight, []
    output = head.output_weight(embedding)
    layers = head.aux_layers if isinstance(head, Eagle3Head) else AUX_LAYERS
    for first in range(0, len(replies), batch):
        some = replies[first : first + batch]
        longest, start = max(len(reply.ids) for reply in some), min(reply.num_prompt for reply in some) - 1
        ids = padded([reply.ids for reply in some], longest + num_drafts + 1, embedding.device)
        rows, right = longest - start, []
        seen = observe(target, ids, layers)
        for step, normed in enumerate(unroll(head, embedding, ids, seen, num_drafts, start, rows)):
            drafts = F.linear(normed, output).argmax(-1)
            right.append(drafts == ids[:, start + 2 + step : start + 2 + step + rows])
        table = torch.stack(right, dim=-1).cpu().numpy()
        for row, reply in zip(table, some, strict=True):
            found.append(row[reply.num_prompt - 1 - start :][: reply.num_answer].copy())
    return found


def walk(right: np.ndarray, num_drafts: int) -> list[Cycle]:
    """The cycles of one answer, from its first token (which the prompt gives) to its end.

    Args:
        right: As ``agreements`` gives it.
        num_drafts: Drafts a cycle, k.
    """
    runs = np.cumprod(right[:, :num_drafts], axis=1).sum(axis=1)
    cycles, at, last = [], 0, len(right) - 1
    while at < last:
        accepted, left = int(runs[at]), last - at
        cycles.append(Cycle(accepted, min(accepted + 1, left), left > num_drafts))
        at += cycles[-1].emitted
    return cycles


def summary(found: list[np.ndarray], num_drafts: int) -> dict[str, object]:
    """Figures of one number of drafts over many answers.

    Returns:
        ``accept_length``: as ``DraftUse`` has it and a server tells it, tokens a cycle, where the ends of short answers
        cut drafts off; ``whole_accept_length``: likewise of cycles that no end cuts, what the head is worth by itself;
        ``accepted_per_position``: share of whole cycles whose first i drafts were all right; ``cycles``,
        ``whole_cycles``.
    """
    cycles = [cycle for right in found for cycle in walk(right, num_drafts)]
    whole = [cycle for cycle in cycles if cycle.is_whole]
    accepted = np.asarray([cycle.accepted for cycle in whole])
    positions = range(1, num_drafts + 1)
    return {
        "accept_length": round(sum(c.emitted for c in cycles) / len(cycles), 4) if cycles else None,
        "whole_accept_length": round(float(accepted.mean()) + 1, 4) if whole else None,
        "accepted_per_position": [round(float((accepted >= i).mean()), 4) for i in positions] if whole else [],
        "cycles": len(cycles),
        "whole_cycles": len(whole),
    }


def figures(
    head: Head, target: Nano, replies: dict[str, list[Reply]], numbers: tuple[int, ...] = NUM_DRAFTS, batch: int = 16
) -> dict[str, dict[str, object]]:
    """The figures by source, and of the dialogues together, for each number of drafts."""
    found = {name: agreements(head, target, some, max(numbers), batch) for name, some in replies.items() if some}
    found["dialogues"] = [right for name in DIALOGUES for right in found.get(name, [])]
    return {
        name: {
            "answers": len(tables),
            "answer_tokens": sum(len(table) for table in tables),
            **{f"k{k}": summary(tables, k) for k in numbers},
        }
        for name, tables in found.items()
    }


def held_out(
    target: Nano, corpus: Arrays, part: str, sources: tuple[str, ...], limit: int, max_tokens: int, batch: int = 16
) -> dict[str, list[Reply]]:
    """The target's answers to validation prompts, by source."""
    return {name: answer(target, prompts_of(corpus, part, name, limit), max_tokens, batch) for name in sources}


def long_replies(target: Nano, corpus: Arrays, limit: int, max_tokens: int, batch: int = 4) -> dict[str, list[Reply]]:
    """Answers in dialogues that stand behind 1,500, 3,500 and 6,500 tokens of other dialogues."""
    return {
        f"services_after_{context}": answer(
            target, prompts_of(corpus, "report", "services", limit, context), max_tokens, batch
        )
        for context in (1500, 3500, 6500)
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--head", type=Path, required=True, help="folder of the head")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.npz")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=100, help="prompts a source")
    parser.add_argument("--long-limit", type=int, default=20, help="prompts behind long contexts; 0 leaves them out")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger("nano.accept")
    target, corpus = load_target(args.model, torch.device(args.device)), load_corpus(args.corpus)
    head = load_head(args.head, target)
    replies = held_out(target, corpus, "report", SOURCES, args.limit, args.max_tokens)
    if args.long_limit:
        replies |= long_replies(target, corpus, args.long_limit, args.max_tokens)
    found = figures(head, target, replies)
    for name, value in found.items():
        log.info("%-20s %s", name, json.dumps(value))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
