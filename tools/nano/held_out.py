"""Writes the prompts that ``hiserve bench spec`` brings along: ``python -m tools.nano.held_out DATA OUT``.

Beginnings of held-out dialogues up to a message of the user, of both sources in turn, longest ones cut to
``MAX_CHARS``. hiserve-nano and its heads were never trained on them.
"""

import argparse
import json
from pathlib import Path

from tools.nano.sources import Document, load_dialogues

NUM_OF_EACH = 64
MAX_CHARS = 800
SOURCES = {"coffee": "coffee_{}.jsonl", "services": "services_{}.jsonl.gz"}


def beginning(document: Document) -> list[dict[str, str]]:
    """Returns the most messages that fit and end with one of the user."""
    kept, best = 0, 0
    for number, (role, content) in enumerate(document.messages, start=1):
        kept += len(content)
        if role == "user" and (kept <= MAX_CHARS or not best) and number < len(document.messages):
            best = number
    return [{"role": role, "content": content} for role, content in document.messages[:best]]


def main() -> None:
    """Writes one prompt a line, the sources in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with dialogues/")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    columns = []
    for source, name in SOURCES.items():
        paths = (given.data / "dialogues" / name.format(part) for part in ("train", "valid"))
        documents = load_dialogues(source, *paths).report
        distinct = {json.dumps(found): found for document in documents if (found := beginning(document))}
        columns.append(list(distinct.values())[:NUM_OF_EACH])
    rows = [messages for pair in zip(*columns, strict=True) for messages in pair]
    lines = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in rows)
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
