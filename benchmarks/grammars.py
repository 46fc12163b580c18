"""What a grammar costs a token: rows under distinct JSON schemas beside rows without any, in one engine, in turns.

Usage: ``python -m benchmarks.grammars OUT.json COMMIT [--shapes llama-8b qwen3-0.6b] [--rounds N] [--tiny | --cpu]`` on a CUDA
device: random weights, a made-up vocabulary like a published one, so that masks cost what they would. Each shape has an
engine without drafts and one with three (n-grams), each of which decodes batches of several sizes: all rows free, all under a
schema of their own, and half of each. A ratio is that of the medians of seconds a step; rows of random weights accept hardly any
draft, so a step is a token. Also told: microseconds a mask, and the seconds that a draw waited for its masks, a step. ``--cpu``
takes hiserve-nano with and without overlap, by CPU time: what overlap hides shows on a GPU alone. ``--tiny`` is a test of this
file.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drive import Drive, Seen, gate_between
from benchmarks.record import ENGINE, Record, gpu_parser, judge
from hiserve.core.request import Grammar
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO, find_model

SEED = 20261123
VOCAB_SIZE = 4096  # ids of prompts are below it
PROMPT, WARM, TIMED = 64, 24, 48  # tokens of a prompt; of each reply before the timing, and in it
MAX_TOKENS = 4 * (WARM + TIMED)
# Bytes of the tokens, in percent of tekken.
LENGTHS = {2: 2, 3: 7, 4: 15, 5: 17, 6: 15, 7: 13, 8: 10, 9: 8, 10: 5, 11: 4, 12: 2, 13: 1, 14: 1}
WAYS = ("free", "constrained", "beside")
BARS = {"off": 1.05, "3 drafts": 1.08, "beside": 1.03, "qwen3-0.6b": 1.25}
# Rounds repeat the prompts: replies to them would be the drafts of the next round.
SPECS: dict[str, dict[str, Any]] = {
    "off": {"spec": "off"},
    "3 drafts": {"spec": "ngram", "spec_steps": 3, "spec_history": 0},
}
ON_CPU: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "model": NANO, "host_cache_gib": 0, "kv_pages": 4096}
Case = tuple[str, dict[str, Any]]


def schema(number: int) -> Grammar:
    """Returns a schema like no other: a long list of objects of several types."""
    types: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24},
        {"type": "integer", "minimum": 0, "maximum": 10**6 + number},
        {"enum": [f"{word} {number}" for word in ("open", "closed", "unknown")]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"type": "boolean"},
    ]
    properties = {f"field_{number}_{index}": types[index % len(types)] for index in range(8)}
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar.of("json", json.dumps({"type": "array", "items": item, "minItems": 200}))


def enlarge(folder: Path, vocab_size: int) -> None:
    """Writes hiserve-nano's configuration and tokenizer, with as many tokens.

    Masks of strings cost what a vocabulary has of long tokens and of letters, so both are as in a published one of 131,072
    tokens (tekken): lengths by ``LENGTHS``, half of the tokens letters of ASCII, and the others of another alphabet.
    """
    source, rng = find_model(NANO), random.Random(SEED)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]

    def join(first: str, second: str) -> None:
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append([first, second])

    letters = [token for token in vocab if (word := token.removeprefix("Ġ")).isalpha() and word.isascii()]
    # Tokenizers of bytes spell the two bytes of a Cyrillic letter like this.
    foreign = [(chr(lead), chr(0x100 + rest)) for lead in (0xD0, 0xD1) for rest in range(0x23, 0x43)]
    for pair in foreign:
        join(*pair)
    alphabets = []
    for tokens in (letters, ["".join(pair) for pair in foreign]):
        inner = [token for token in tokens if not token.startswith("Ġ")]
        alphabets.append(tuple({n: [t for t in of if len(t) == n] for n in range(1, 16)} for of in (tokens, inner)))
    while len(vocab) < vocab_size:
        heads, inner_by_length = alphabets[len(vocab) % 2]
        (length,) = rng.choices(list(LENGTHS), list(LENGTHS.values()))
        cuts = [cut for cut in range(1, length) if heads[cut] and inner_by_length[length - cut]]
        if cuts:
            cut = rng.choice(cuts)
            made = rng.choice(heads[cut]), rng.choice(inner_by_length[length - cut])
            if "".join(made) not in vocab:
                join(*made)
                heads[length].append("".join(made))
                if not made[0].startswith("Ġ"):
                    inner_by_length[length].append("".join(made))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))


def decode(drive: Drive, rows: int, way: str, rng: np.random.Generator) -> dict[str, float]:
    """Returns seconds a step of rows that all decode, on a CPU those of its time, and the masks of these steps."""
    now = time.process_time if drive.settings.model.device == "cpu" else time.perf_counter
    masked = {"free": 0, "constrained": rows, "beside": rows // 2}[way]
    seen: list[Seen] = []
    for row in range(rows):
        prompt = rng.integers(7, VOCAB_SIZE, PROMPT).astype(np.int32)
        more = {"grammar": schema(row)} if row < masked else {}
        seen.append(drive.add(prompt, MAX_TOKENS, temperature=1.0, seed=row, **more))
    while min(len(each.tokens) for each in seen) < WARM:
        drive.step()
    before, begin, num_tokens = drive.engine.stats(), now(), sum(len(each.tokens) for each in seen)
    for _ in range(TIMED):
        drive.step()
    seconds, after = now() - begin, drive.engine.stats()
    assert not any(each.is_done for each in seen), "a reply ended while it was timed"
    num_steps, num_masks = after.steps - before.steps, after.grammars.masks - before.grammars.masks
    mask_s = after.grammars.mask_seconds - before.grammars.mask_seconds
    found = {
        "seconds_a_step": seconds / num_steps,
        "tokens_a_step": (sum(len(each.tokens) for each in seen) - num_tokens) / num_steps / rows,
        "masks_a_step": num_masks / num_steps,
        "mask_seconds_a_step": mask_s / num_steps,
        "replayed": sum(gate_between(before.graph_gate, after.graph_gate).get("replay", {}).values()) / num_steps,
    }
    drive.abort(*seen)
    return found


def compare(drive: Drive, rows: int, rounds: int) -> dict[str, Any]:
    """Times all ways in turns, after a round that is not counted."""
    rng, runs = (
        np.random.default_rng(SEED),
        {way: list[dict[str, float]]() for way in WAYS if rows > 1 or way != "beside"},
    )
    for _ in range(rounds + 1):
        for way, found in runs.items():
            found.append(decode(drive, rows, way, rng))
    whole = {
        way: {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}
        for way, found in runs.items()
    }
    free = whole["free"]["seconds_a_step"]
    ratios = {way: round(each["seconds_a_step"] / free, 4) for way, each in whole.items() if way != "free"}
    each_round = {way: [round(one["seconds_a_step"] * 1e3, 3) for one in found[1:]] for way, found in runs.items()}
    constrained = whole["constrained"]
    mask_us = 1e6 * constrained["mask_seconds_a_step"] / max(1.0, constrained["masks_a_step"])
    return {"ratios": ratios, "mask_us": round(mask_us, 1), "medians": whole, "ms_a_step": each_round}


def measure(
    cases: Sequence[Case], batches: Sequence[int], rounds: int
) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Yields case, drafts, rows and what was found."""
    for name, settings in cases:
        for drafts, spec in SPECS.items():
            drive = Drive(**settings, **spec, max_running_requests=max(batches), max_model_len=1024, awaits_host=False)
            for rows in batches:
                yield name, drafts, rows, compare(drive, rows, rounds)
            drive.close()


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-8b", "qwen3-0.6b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    given.tiny = is_tiny = given.tiny and not given.cpu
    given.tiny |= given.cpu
    batches = (1, 3) if is_tiny else (1, 8, 32) if given.cpu else (1, 8, 32, 128)
    command = f"python -m benchmarks.grammars OUT.json COMMIT --rounds {given.rounds}"
    result = Record.of(given, command, *ENGINE, "hiserve/grammar")
    figures: dict[str, float] = {}
    bars: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases: list[Case] = [
            (f"overlap {depth}", ON_CPU | {"overlap": depth}) for depth in ((1,) if is_tiny else (0, 1))
        ]
        if not given.tiny:
            cases = []
            for shape in given.shapes:
                place = Path(folder) / shape
                place.mkdir()
                enlarge(place, SHAPES[shape]["vocab_size"])
                random_weights = {"shape": shape, "load_format": "dummy", "model": str(place)}
                cases.append((shape, random_weights | {"device": "cuda", "host_cache_gib": 0}))
        for name, drafts, rows, found in measure(cases, batches, 1 if is_tiny else given.rounds):
            result[f"{name}, {drafts}, {rows} rows"] = found
            result.save()
            for way, ratio in found["ratios"].items():
                label = f"{name}, {drafts}, {rows} rows, {way}"
                figures[label] = ratio
                bars[label] = BARS["beside"] if way == "beside" else BARS.get(name, BARS[drafts])
            print(f"{name}, {drafts}, {rows} rows: {found['ratios']}, {found['mask_us']} us a mask", flush=True)
    missed = judge(figures, most={} if given.tiny else bars)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
