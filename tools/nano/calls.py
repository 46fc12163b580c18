"""Measures unprompted calls of hiserve-nano: ``python -m tools.nano.calls --data DATA --json FILE``.

Chats with tools of the held-out half of the services dialogues are served up to a turn of the assistant, greedily, with
nothing that forces a call or its form. A turn either is a call of the chat or is not; the arguments of a call are valid
if the schema in its tool's declaration accepts them, and equal if they are those of the dialogue.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.record import ENGINE, about
from hiserve import LLM, SamplingParams
from tools.nano.orders import find_orders
from tools.nano.sources import Document, load_dialogues
from tools.nano.tool_dialogues import with_calls, with_json

COPIES = 8  # chats of a dialogue, each with names and tools of its own
BARS = {"name": 0.9, "valid": 0.9}
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 4096,
    "host_cache_gib": 0,
    "log_level": "warning",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn that a server is asked for."""

    messages: list[dict[str, Any]]  # before it
    tools: list[dict[str, Any]]
    call: dict[str, Any] | None  # its function's name and arguments


def tool_turns(documents: list[Document], copies: int, rng: random.Random) -> Iterator[Turn]:
    """Yields every turn of the assistant in chats with tools, calls and others."""
    for document in documents * copies:
        chat = with_calls(document.messages, rng)
        for place, message in enumerate(chat.messages if chat else ()):
            if chat and message["role"] == "assistant":
                calls = [call["function"] for call in message.get("tool_calls", ())]
                yield Turn(chat.messages[:place], chat.tools, calls[0] if calls else None)


def judge(turn: Turn, calls: list[dict[str, Any]]) -> dict[str, bool]:
    """Compares the calls of a reply with the one that the turn holds; ``calls`` are functions with arguments as a text."""
    is_called = len(calls) == 1
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in turn.tools}
    name = calls[0]["name"] if is_called else ""
    try:
        arguments = json.loads(calls[0]["arguments"]) if is_called else None
    except ValueError:
        arguments = None
    is_valid = name in schemas and Draft202012Validator(schemas[name]).is_valid(arguments)
    wanted = turn.call or {"name": None, "arguments": None}
    return {
        "called": is_called,
        "name": name == wanted["name"],
        "valid": name == wanted["name"] and is_valid,
        "equal": name == wanted["name"] and arguments == wanted["arguments"],
    }


def shares(rows: list[dict[str, bool]]) -> dict[str, float]:
    """Share of each judgement, and the number of rows as ``turns``."""
    return {"turns": len(rows)} | {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in rows[0]}


def json_share(llm: LLM, documents: list[Document], copies: int, rng: random.Random) -> dict[str, float]:
    """Asks for JSON of a schema in the system message, with no grammar; shares that the schema accepts."""
    rows = []
    for document in documents * copies:
        chat = with_json(document.messages, rng)
        if chat is None:
            continue
        *asked, answer = chat.messages
        told = asked[0]["content"]
        schema = json.loads(told[told.index("{") :])
        text = llm.chat(asked, GREEDY)[0].outputs[0].text
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        is_equal = value == json.loads(answer["content"])
        rows.append({"valid": Draft202012Validator(schema).is_valid(value), "equal": is_equal})
    return shares(rows)


def main() -> int:
    """Command line; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with dialogues/")
    parser.add_argument("--model", default="hiserve-nano")
    parser.add_argument("--copies", type=int, default=COPIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    folder, rng = args.data / "dialogues", random.Random(args.seed)
    paths = (folder / f"services_{part}.jsonl.gz" for part in ("train", "valid"))
    documents = load_dialogues("services", *paths).report
    turns = list(tool_turns(documents, args.copies, rng))
    command = f"python -m tools.nano.calls --data DATA --copies {args.copies} --seed {args.seed}"
    result = about(command, *ENGINE, "hiserve/text", "tools/nano") | {"bars": BARS}
    rows: dict[bool, list[dict[str, bool]]] = {True: [], False: []}
    with LLM(args.model, **SETTINGS) as llm:
        for turn in turns:
            (choice,) = llm.chat(turn.messages, GREEDY, tools=turn.tools)[0].outputs
            rows[turn.call is not None].append(judge(turn, [call["function"] for call in choice.tool_calls]))
        result["json"] = json_share(llm, documents, args.copies, rng)
    result["dialogues"] = sum(bool(find_orders(document.messages)) for document in documents)
    result["calls"] = shares(rows[True])
    result["other_turns"] = {name: shares(rows[False])[name] for name in ("turns", "called")}
    for name in ("dialogues", "calls", "other_turns", "json"):
        print(name, result[name])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(result["calls"][name] < bar for name, bar in BARS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
