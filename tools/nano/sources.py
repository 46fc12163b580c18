"""Reading of the training data: dialogues, word problems, agent sessions, and the split rule.

A *document* is either a chat (a list of messages) or plain text. Everything that must never be trained on
(the validation files, the held-out agent sessions, training dialogues that also stand in a validation file) is
separated here, so that no later step can mix it in again.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SESSION_DIGITS = frozenset("0123")
HELD_OUT_ONE_IN = 40

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """One training or validation item."""

    source: str  # ``coffee``, ``services``, ``math``, ``agent``, ``python`` or ``pytask``
    messages: tuple[tuple[str, str], ...] = ()  # turns of a chat; empty for plain text
    text: str = ""  # plain text; empty for a chat

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the contents, without special tokens."""
        return len(self.text.encode()) + sum(len(content.encode()) for _, content in self.messages)


@dataclass(frozen=True, slots=True)
class Split:
    """Documents of one source by use, and how many training documents were dropped."""

    train: list[Document]  # trained on
    early: list[Document]  # used to choose the checkpoint
    report: list[Document]  # used for reported figures only
    dropped: dict[str, int]  # training documents dropped, by reason


def read_jsonl(path: Path) -> Iterator[dict[str, object]]:
    """Yields the objects of a ``.jsonl`` or ``.jsonl.gz`` file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def held_out(key: str) -> bool:
    """Whether an item without a validation file of its own is kept for reporting (one in 40, by hash)."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _chat(source: str, record: dict[str, object]) -> Document:
    messages = record["messages"]
    if not isinstance(messages, list):
        raise ValueError(f"{source}: a record's 'messages' is no list")
    return Document(source, messages=tuple((str(m["role"]), str(m["content"])) for m in messages))


def _normalised(document: Document) -> tuple[tuple[str, str], ...]:
    """The dialogue without case, punctuation and spacing, to find near-exact copies."""
    return tuple((role, " ".join(re.findall(r"\w+", content.lower()))) for role, content in document.messages)


def load_dialogues(source: str, train_path: Path, valid_path: Path) -> Split:
    """Reads a source that has a validation file; its first half chooses checkpoints, its second is reported.

    Training dialogues equal to a validation dialogue, exactly or up to case, punctuation and spacing, are dropped.
    """
    valid = [_chat(source, record) for record in read_jsonl(valid_path)]
    exact = {document.messages for document in valid}
    near = {_normalised(document) for document in valid}
    train: list[Document] = []
    dropped = {"exact": 0, "near": 0}
    for document in (_chat(source, record) for record in read_jsonl(train_path)):
        if document.messages in exact:
            dropped["exact"] += 1
        elif _normalised(document) in near:
            dropped["near"] += 1
        else:
            train.append(document)
    half = len(valid) // 2
    return Split(train=train, early=valid[:half], report=valid[half:], dropped=dropped)


def load_math(path: Path) -> Split:
    """Reads the word problems, removes the ``<<...>>`` calculator marks, keeps one problem in 40 for reporting."""
    train: list[Document] = []
    report: list[Document] = []
    for record in read_jsonl(path):
        chat = _chat("math", record)
        clean = tuple((role, re.sub(r"<<.*?>>", "", content)) for role, content in chat.messages)
        (report if held_out(clean[0][1]) else train).append(Document("math", messages=clean))
    return Split(train=train, early=[], report=report, dropped={})


def load_agent_sessions(paths: list[Path]) -> Split:
    """Reads agent sessions as chats of their longest prompt and its output.

    Sessions whose id ends in a hexadecimal digit 0-3 go to ``report`` and are never trained on.
    """
    longest: dict[str, tuple[str, str]] = {}
    for path in paths:
        for record in read_jsonl(path):
            session, prompt, output = (str(record[key]) for key in ("session_id", "input", "output"))
            if len(prompt) >= len(longest.get(session, ("", ""))[0]):
                longest[session] = (prompt, output)
    train: list[Document] = []
    report: list[Document] = []
    for session, (prompt, output) in sorted(longest.items()):
        document = Document("agent", messages=(("user", prompt), ("assistant", output)))
        (report if session[-1] in HELD_OUT_SESSION_DIGITS else train).append(document)
    return Split(train=train, early=[], report=report, dropped={})
