"""Builds the tokenizer and the packed corpus: ``python -m tools.nano.corpus --data DATA --out OUT``.

The corpus is one ``.npz`` of uint16 tokens, so that a training machine needs neither the data nor the tokenizer.
Documents are stored as *bodies* (without ``<|bos|>``) and system messages as *heads*; ``tools.nano.stream`` joins them.
"""

import argparse
import json
import logging
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.nano.python_source import load_python
from tools.nano.sources import Split, load_agent_sessions, load_dialogues, load_math
from tools.nano.tokenizer import encode_body, encode_head, save_tokenizer, train_tokenizer
from tools.nano.tool_dialogues import tool_dialogues

# How often one epoch sees a source.
WEIGHTS = {"coffee": 4, "services": 2, "math": 2, "agent": 1, "python": 1, "pytask": 1, "tools": 1}
SYSTEM_MESSAGES = {
    "coffee": (
        "You are a barista. Take the customer's order.",
        "You work at the coffee bar and help customers to order drinks.",
        "You are a friendly assistant who takes coffee and tea orders.",
    ),
    "services": (
        "You help people to book restaurants, hotels, travel and appointments.",
        "You are an assistant for bookings, events, banking and calendars.",
        "You find services for the user and confirm the details before you book.",
    ),
    "math": (
        "You solve word problems step by step and end with the answer after ####.",
        "You are a patient maths teacher. Show your work.",
        "Solve the problem. Write the final number after ####.",
    ),
    "pytask": (
        "You write Python code.",
        "You are a programmer. Answer with a Python function.",
    ),
}
ANY_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are hiserve-nano, a small assistant.",
    "Answer the user briefly and politely.",
    "You help the user with orders, bookings, word problems and Python.",
)
NUM_NOTES = 24


def load_splits(data: Path) -> dict[str, Split]:
    """Reads every source below ``data`` (``dialogues/``, ``traces/``) and the standard library."""
    dialogues, traces = data / "dialogues", data / "traces"
    files, tasks = load_python()
    return {
        "coffee": load_dialogues("coffee", dialogues / "coffee_train.jsonl", dialogues / "coffee_valid.jsonl"),
        "services": load_dialogues(
            "services", dialogues / "services_train.jsonl.gz", dialogues / "services_valid.jsonl.gz"
        ),
        "math": load_math(dialogues / "math_train.jsonl"),
        "agent": load_agent_sessions(sorted(traces.glob("agent_*.jsonl.gz"))),
        "python": files,
        "pytask": tasks,
    }


def tokenizer_texts(splits: dict[str, Split]) -> list[str]:
    """Texts to train the tokenizer on: the training documents, each source as often as an epoch sees it."""
    texts: list[str] = []
    for source, split in splits.items():
        contents = [
            text for d in split.train for text in ([d.text] if d.text else [content for _, content in d.messages])
        ]
        texts += contents * WEIGHTS[source]
    return texts


def system_notes(splits: dict[str, Split], rng: random.Random) -> list[str]:
    """Long system messages of up to 1,500 characters cut from training files, so that unknown ones do no harm."""
    files = [document.text for document in splits["python"].train if len(document.text) > 3000]
    notes = []
    for text in rng.sample(files, min(NUM_NOTES, len(files))):
        start = rng.randrange(len(text) - 2000)
        notes.append("Use these notes:\n" + text[start : start + rng.randrange(200, 1500)])
    return notes


class Packer:
    """Collects token sequences into one buffer with start offsets, lengths and source numbers."""

    def __init__(self) -> None:
        """Starts empty."""
        self.tokens: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.sources: list[int] = []
        self.num_bytes: list[int] = []

    def add(self, ids: list[int], source: int, num_bytes: int = 0) -> None:
        """Appends one sequence."""
        self.tokens.append(np.asarray(ids, dtype=np.uint16))
        self.lengths.append(len(ids))
        self.sources.append(source)
        self.num_bytes.append(num_bytes)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """The buffer as named arrays: tokens uint16, the rest int32, one entry a sequence."""
        return {
            f"{prefix}_tokens": np.concatenate(self.tokens),
            f"{prefix}_lengths": np.asarray(self.lengths, dtype=np.int32),
            f"{prefix}_sources": np.asarray(self.sources, dtype=np.int32),
            f"{prefix}_bytes": np.asarray(self.num_bytes, dtype=np.int32),
        }


def pack(splits: dict[str, Split], tokenizer: Tokenizer, seed: int) -> dict[str, np.ndarray]:
    """Tokenises everything.

    Returns:
        Arrays ``body_*`` (training documents), ``head_*`` (system messages; the first is the bare ``<|bos|>``),
        ``early_*`` and ``report_*`` (whole validation documents, ``<|bos|>`` included), and ``weights`` by source.
    """
    rng = random.Random(seed)
    names = list(splits)
    packers = {part: Packer() for part in ("body", "head", "early", "report")}
    bos = encode_head(tokenizer, "")
    packers["head"].add(bos, -1)
    notes = system_notes(splits, rng)
    for number, source in enumerate(names):
        split = splits[source]
        for document in split.train:
            packers["body"].add(encode_body(tokenizer, document), number, document.num_bytes)
        for part, documents in (("early", split.early), ("report", split.report)):
            for document in documents:
                packers[part].add(bos + encode_body(tokenizer, document), number, document.num_bytes)
        if source in SYSTEM_MESSAGES:
            for text in (*SYSTEM_MESSAGES[source], *ANY_SYSTEM_MESSAGES, *notes[number :: len(names)][:4]):
                packers["head"].add(encode_head(tokenizer, text), number)
    packed: dict[str, np.ndarray] = {}
    for part, packer in packers.items():
        packed |= packer.arrays(part)
    packed["weights"] = np.asarray([WEIGHTS[source] for source in names], dtype=np.int32)
    packed["source_names"] = np.asarray(names)
    return packed


def summary(splits: dict[str, Split], packed: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Documents, tokens and dropped documents by source."""
    rows: dict[str, dict[str, int]] = {}
    for number, (source, split) in enumerate(splits.items()):
        mine = packed["body_sources"] == number
        rows[source] = {
            "train_documents": len(split.train),
            "train_tokens": int(packed["body_lengths"][mine].sum()),
            "train_bytes": int(packed["body_bytes"][mine].sum()),
            "weight": WEIGHTS[source],
            "early_documents": len(split.early),
            "report_documents": len(split.report),
            **{f"dropped_{reason}": count for reason, count in split.dropped.items()},
        }
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with dialogues/ and traces/")
    parser.add_argument("--out", type=Path, required=True, help="folder for corpus.npz and corpus.json")
    parser.add_argument("--model", type=Path, required=True, help="folder for the tokenizer's files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger("nano.corpus")
    log.info("seed %d", args.seed)
    splits = load_splits(args.data)
    tokenizer = train_tokenizer(tokenizer_texts(splits))
    save_tokenizer(tokenizer, args.model)
    splits["tools"] = tool_dialogues(splits["services"], args.seed)  # after the tokenizer, which does not know them
    packed = pack(splits, tokenizer, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out / "corpus.npz", allow_pickle=False, **packed)
    rows = summary(splits, packed)
    (args.out / "corpus.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for source, row in rows.items():
        log.info("%-9s %s", source, row)
    log.info("tokens an epoch: %d", sum(row["train_tokens"] * row["weight"] for row in rows.values()))


if __name__ == "__main__":
    main()
