"""Serves held-out prompts and compares what is accepted with what ``accept`` predicts of the same replies.

``python -m tools.nano.accept_served --corpus NPZ --json FILE`` does it for the heads that hiserve-nano comes with,
at temperature 0 in its usual float32 on the CPU; and at a temperature, where drafts are drawn with the noise of the
tokens they stand for, it shows what that gains over drafts that are always the likeliest.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import ENGINE, about
from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.models.model_config import NANO, find_model
from hiserve.spec.head import HeadProposer
from tools.nano.accept import SOURCES, Reply, agreements, figures, prompts_of, walk
from tools.nano.head_files import load_head, load_target
from tools.nano.heads import Head
from tools.nano.model import Nano
from tools.nano.stream import DIALOGUES, load_corpus

STEPS = {"eagle3": 3, "mtp": 1}  # drafts, of the bars
BARS = {"eagle3": 2.8, "mtp": 1.6}  # accept length in dialogues, as users see it at temperature 0
MAX_DIFFERENCE = 0.05  # of the served accept length from the predicted
TEMPERATURE, SEEDS = 0.8, (1, 2, 3)
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float32",
    "device": "cpu",
    "max_running_requests": 8,
    "max_model_len": 2048,
    "host_cache_gib": 0,
    "log_level": "warning",
}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server made of some prompts."""

    replies: list[Reply]  # prompts and answers, in order of their lengths
    use: DraftUse  # what became of the drafts, all answers together


def bundled_head(kind: str, target: Nano) -> Head:
    """Returns the head of that kind that hiserve-nano comes with, in training form."""
    return load_head(find_model(NANO) / kind, target)


def serve(llm: LLM, prompts: list[np.ndarray], sampling: SamplingParams) -> Served:
    """Answers prompts, together as far as the server's rows go."""
    results = llm.generate([prompt.tolist() for prompt in prompts], sampling)
    replies, uses = [], []
    for prompt, result in zip(prompts, results, strict=True):
        (choice,) = result.outputs
        replies.append(Reply(np.concatenate([prompt, np.asarray(choice.token_ids, dtype=np.int64)]), len(prompt)))
        uses.append(choice.drafts or DraftUse())
    return Served(sorted(replies, key=lambda reply: len(reply.ids)), reduce(add, uses))


def predict(head: Head, target: Nano, replies: list[Reply], num_drafts: int, batch: int = 8) -> DraftUse:
    """Returns what a server counts of these replies, by the head unrolled over them."""
    tables = agreements(head, target, replies, num_drafts, batch)
    cycles = [cycle for right in tables for cycle in walk(right, num_drafts)]
    accepted = np.asarray([cycle.emitted - 1 for cycle in cycles])
    places = [int((accepted >= place).sum()) for place in range(1, num_drafts + 1)]
    return DraftUse(len(cycles), len(cycles) * num_drafts, tuple(places))


@contextmanager
def greedy_drafts(llm: LLM) -> Iterator[None]:
    """Lets the head of an engine in this process propose the likeliest tokens, whatever the temperature."""
    proposer = llm._backend.engine._executor._runners._proposer  # type: ignore[attr-defined]
    assert isinstance(proposer, HeadProposer)
    usual = proposer.draft

    def draw(chain: Any, tree: None, *, is_greedy: bool) -> None:
        usual(chain, tree, is_greedy=True)

    proposer.draft = draw  # type: ignore[method-assign]
    yield
    proposer.draft = usual  # type: ignore[method-assign]


def shown(use: DraftUse) -> dict[str, Any]:
    """Accept length, and the share of verifying steps whose first i drafts were accepted."""
    shares = [round(count / max(1, use.verify_steps), 4) for count in use.accepted_per_position]
    return {
        "accept_length": round(use.accept_length, 4),
        "accepted_per_position": shares,
        "verify_steps": use.verify_steps,
    }


def at_zero(kind: str, target: Nano, prompts: dict[str, list[np.ndarray]], max_tokens: int) -> dict[str, Any]:
    """Served and predicted acceptance of a head by source, and of the dialogues together."""
    head, steps = bundled_head(kind, target), STEPS[kind]
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    with LLM(spec=kind, spec_steps=steps, **SETTINGS) as llm:
        served = {name: serve(llm, some, sampling) for name, some in prompts.items()}
    replies = {name: some.replies for name, some in served.items()}
    offline = figures(head, target, replies)
    together = [served[name] for name in DIALOGUES if name in served]
    served["dialogues"] = Served([r for some in together for r in some.replies], reduce(add, (s.use for s in together)))
    found: dict[str, Any] = {}
    for name, some in served.items():
        predicted = predict(head, target, some.replies, steps)
        found[name] = {
            "served": shown(some.use),
            "predicted": shown(predicted),
            "difference": round(some.use.accept_length / predicted.accept_length - 1, 4),
        }
    return {"steps": steps, "served": found, "predicted": offline}


def at_temperature(kind: str, prompts: list[np.ndarray], max_tokens: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Acceptance of the same drawn replies, with drafts drawn with their noise and with the likeliest as drafts."""
    uses = {"coupled": DraftUse(), "greedy": DraftUse()}
    num_equal = num_replies = 0
    with LLM(spec=kind, spec_steps=STEPS[kind], **SETTINGS) as llm:
        for seed in seeds:
            sampling = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=max_tokens)
            coupled = serve(llm, prompts, sampling)
            with greedy_drafts(llm):
                greedy = serve(llm, prompts, sampling)
            uses = {"coupled": uses["coupled"] + coupled.use, "greedy": uses["greedy"] + greedy.use}
            theirs = {reply.ids.tobytes() for reply in greedy.replies}
            num_equal += sum(reply.ids.tobytes() in theirs for reply in coupled.replies)
            num_replies += len(prompts)
    return {
        "temperature": TEMPERATURE,
        "steps": STEPS[kind],
        "seeds": list(seeds),
        "replies": num_replies,
        "replies_equal": num_equal,
        **{name: shown(use) for name, use in uses.items()},
        "gain": round(uses["coupled"].accept_length / uses["greedy"].accept_length - 1, 4),
    }


def main() -> int:
    """Command line; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.npz")
    parser.add_argument("--limit", type=int, default=100, help="prompts a source")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    target, corpus = load_target(find_model(NANO), torch.device("cpu")), load_corpus(args.corpus)
    prompts = {name: prompts_of(corpus, "report", name, args.limit) for name in SOURCES}
    dialogues = [prompt for name in DIALOGUES for prompt in prompts[name]]
    command = f"python -m tools.nano.accept_served --corpus CORPUS --limit {args.limit} --max-tokens {args.max_tokens}"
    result = about(command, *ENGINE, "tools/nano") | {"bars": BARS, "max_difference": MAX_DIFFERENCE}
    is_met = True
    for kind in STEPS:
        found = at_zero(kind, target, prompts, args.max_tokens)
        result[kind] = found | {"drawn": at_temperature(kind, dialogues, args.max_tokens, SEEDS)}
        length = found["served"]["dialogues"]["served"]["accept_length"]
        differences = [each["difference"] for each in found["served"].values()]
        gain = result[kind]["drawn"]["gain"]
        drawn = result[kind]["drawn"]["coupled"]["accept_length"]
        print(
            f"{kind}: {length} in dialogues, {drawn} drawn; served differs by {differences}; drawn drafts gain {gain}"
        )
        is_met = is_met and length >= BARS[kind] and max(map(abs, differences)) <= MAX_DIFFERENCE and gain > 0
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not is_met)


if __name__ == "__main__":
    raise SystemExit(main())
