"""Accept length of hiserve-nano's drafts under a grammar, over that without one, on the same replies.

Usage: ``python -m benchmarks.accept_constrained [--dry | --tiny]``, on a CPU, greedily, with three drafts of its EAGLE-3 head. Held-out
dialogues are asked for JSON of a schema, for a call of a tool, and for words. Each is answered freely, and again under a grammar that allows
the free reply: its schema, ``strict`` tools, and a choice of that text alone. Where both replies are of the same tokens, but for the end
token, their accept lengths are compared; the others are counted. Counts do not depend on other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.nano_spec import PROMPTS
from benchmarks.record import ENGINE, RESULTS, Record, judge
from hiserve import LLM, SamplingParams
from hiserve.bench.spec_engine import HELD_OUT
from hiserve.core.request import Grammar
from hiserve.core.usage import DraftUse
from hiserve.grammar import bounds
from hiserve.llm.outputs import CompletionOutput
from tools.nano.tool_dialogues import with_calls, with_json

CODE = (*ENGINE, "hiserve/grammar", "hiserve/text", "hiserve/llm", "benchmarks/accept_constrained.py")
SEED, MAX_TOKENS, COPIES = 20261123, 160, 6
NUM_DRAFTS = 3
BAR = 0.9
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "device": "cpu",
    "cpu_threads": 1,
    "host_cache_gib": 0,
    "kv_pages": 1024,
}


class Pair(NamedTuple):
    """The reply to a request, free and under a grammar."""

    kind: str
    free: CompletionOutput
    constrained: CompletionOutput

    @property
    def is_same(self) -> bool:
        """Whether they are of the same tokens; the end token is missing where the grammar ended the reply."""
        free, held = self.free.token_ids, self.constrained.token_ids
        return len(held) >= len(free) - 1 and free[: len(held)] == held


def under(grammar: Grammar) -> SamplingParams:
    """Returns ``GREEDY`` with a grammar."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS, grammar=grammar)


def chats(copies: int) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yields conversations that ask for JSON, without tools, or for a call, with tools."""
    rng = random.Random(SEED)
    dialogues = [json.loads(line)["messages"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    for dialogue in dialogues * copies:
        said = [(each["role"], each["content"]) for each in dialogue]
        if (asked := with_json(said, rng)) is not None:
            yield asked.messages[:-1], []
        if (called := with_calls(said, rng)) is not None:
            places = [place for place, each in enumerate(called.messages) if each.get("tool_calls")]
            for place in places:
                yield called.messages[:place], called.tools


def pairs(llm: LLM, num_words: int, copies: int) -> Iterator[Pair]:
    """Yields each request's replies."""
    for messages, tools in chats(copies):
        if tools:
            strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
            outputs = [llm.chat(messages, GREEDY, tools=each)[0].outputs[0] for each in (tools, strict)]
            yield Pair("calls", *outputs)
            continue
        told = messages[0]["content"]
        grammar = bounds.json_schema(json.loads(told[told.index("{") :]), "schema")
        outputs = [llm.chat(messages, each)[0].outputs[0] for each in (GREEDY, under(grammar))]
        yield Pair("json", *outputs)
    for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:num_words]:
        prompt = json.loads(line)["prompt"]
        free = llm.generate([prompt], GREEDY)[0].outputs[0]
        grammar = bounds.choice([free.text], "choice")
        yield Pair("words", free, llm.generate([prompt], under(grammar))[0].outputs[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print and write nothing")
    parser.add_argument("--tiny", action="store_true", help="a few requests; implies --dry")
    given = parser.parse_args()
    with LLM("hiserve-nano", spec_steps=NUM_DRAFTS, log_level="warning", **SETTINGS) as llm:
        found = list(pairs(llm, 2 if given.tiny else 10**6, 1 if given.tiny else COPIES))
    kinds = {}
    for kind in dict.fromkeys(pair.kind for pair in found):
        same = [pair for pair in found if pair.kind == kind and pair.is_same]
        uses = {way: sum((getattr(pair, way).drafts for pair in same), DraftUse()) for way in ("free", "constrained")}
        lengths = {way: round(use.accept_length, 4) for way, use in uses.items()}
        steps = {way: use.verify_steps for way, use in uses.items()}
        counts = {"requests": sum(pair.kind == kind for pair in found), "same": len(same)}
        kinds[kind] = counts | {"accept_length": lengths, "verify_steps": steps}
        print(kind, kinds[kind], flush=True)
    ratios = {
        kind: each["accept_length"]["constrained"] / each["accept_length"]["free"] for kind, each in kinds.items()
    }
    missed = judge(ratios, least=dict.fromkeys(ratios, BAR))
    if given.dry or given.tiny:
        return 0
    record = Record(RESULTS / "accept_constrained.json", "python -m benchmarks.accept_constrained", *CODE)
    record |= {"drafts": NUM_DRAFTS, "bar": BAR, "ratios": {kind: round(each, 4) for kind, each in ratios.items()}}
    record |= {"kinds": kinds}
    record.save()
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
