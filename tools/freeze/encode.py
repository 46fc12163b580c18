"""Plans, results and reports as lines of text, alike on every machine and under every name of the code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from tools.freeze import names
from tools.freeze.names import value

DIGITS = 4  # of a log-probability
WORD_BYTES = 4


class Encoder:
    """Writes lines. Digests are numbered in the order in which they appear: their values may change."""

    def __init__(self) -> None:
        self._digests: dict[bytes, int] = {}

    def plan(self, plan: Any) -> Iterator[str]:
        """Yields a head line, then the parts of the plan, in the order of their execution."""

        def of(key: str) -> Any:
            return value(plan, names.PLAN, key)

        flags = [word for word, is_on in (("cold", of("cold")), ("no replay", not of("replay"))) if is_on]
        yield f"step {of('step')}: propose {of('propose')}, relocations {of('relocations')} {' '.join(flags)}".rstrip()
        yield from _listed("release rows", of("released"))
        yield from map(self._admission, of("admitted"))
        yield from _table(*(of(f"table_{column}") for column in ("rows", "indices", "pages", "owners", "new")))
        yield from _listed("release host pages", of("host_released"))
        yield from map(self._copy, of("copies"))
        for lookup in of("lookups"):
            digests = self._named(value(lookup, names.LOOKUP, "digests"))
            yield f"  look up for {value(lookup, names.LOOKUP, 'request')}: {digests}"
        yield from _listed("wait for loads", of("waits"))
        columns = [of(key).tolist() for key in ("rows", "new", "drafts", "samples", "scored", "bound")]
        for row, new, drafts, samples, scored, bound in zip(*columns, strict=True):
            flags = " samples" * samples + f" scored {scored}" * bool(scored)
            yield f"  row {row}: compute {new}, drafts {drafts}, bound {bound}{flags}"

    def result(self, result: Any) -> Iterator[str]:
        """Yields the result of a step; of each row only the valid part."""

        def of(key: str) -> Any:
            return value(result, names.RESULT, key)

        if of("deferred"):
            yield f"  = deferred: {of('deferred')}"
        if of("fault") is not None:
            yield f"  = fault: {value(of('fault'), names.FAULT, 'kind')}, replay {value(of('fault'), names.FAULT, 'replay')}"
        yield from _listed("= stale rows", of("faults"))
        counts, tokens, scores = of("counts").tolist(), of("tokens"), of("scores")
        for index, count in enumerate(counts):
            shown = "" if scores is None else f"; {_scores(scores, index * tokens.shape[1], count)}"
            yield f"  = {index}: {_joined(tokens[index, :count])}{shown}"
        prompt = of("prompt_scores")
        if prompt is not None:
            yield f"  = prompt: {_scores(prompt, 0, value(prompt, names.SCORES, 'own').size)}"

    def report(self, report: Any) -> Iterator[str]:
        """Yields the updates of each request, and the pages that the index has gained and lost."""

        def of(key: str) -> Any:
            return value(report, names.REPORT, key)

        token_at = score_at = 0
        columns = [of(key) for key in ("requests", "counts", "ends", "cached", "drafts", "words")]
        for uid, count, end, cached, drafts, words in zip(*columns, strict=True):
            parts = [_joined(of("tokens")[token_at : token_at + count])]
            packed = of("scores")[score_at : score_at + WORD_BYTES * words]
            token_at, score_at = token_at + count, score_at + WORD_BYTES * words
            parts += [f"{words} words of scores"] * bool(packed)
            parts += [] if cached is None else ["cached " + _fields(cached, names.CACHED)]
            parts += [] if drafts is None else ["drafts " + _fields(drafts, names.DRAFTS)]
            parts += [names.ENDS[end]] * bool(end)
            yield f"  > {uid}: {'; '.join(parts)}"
        for uid, code, _ in of("failed"):
            yield f"  > {uid}: failed, {code}"
        for key in ("published", "removed"):
            digests = [of(key)[at : at + 16] for at in range(0, len(of(key)), 16)]
            if digests:
                yield f"  > {key} {self._named(digests)}"

    def _admission(self, admit: Any) -> str:
        of = {key: value(admit, names.ADMISSION, key) for key in names.ADMISSION}
        sampling = msgspec.to_builtins(of["sampling"], str_keys=True)
        return (
            f"  admit row {of['row']}: {of['tokens'].size} tokens ({_hash(of['tokens'])}), prompt {of['prompt']}, "
            f"computed {of['computed']}, choice {of['choice']}, {dict(sorted(sampling.items()))}"
        )

    def _copy(self, copy: Any) -> str:
        of = {key: value(copy, names.COPY, key) for key in names.COPY}
        pages = f"device {_joined(of['device'])} host {_joined(of['host'])}"
        return f"  {names.KINDS[of['kind']]} {of['number']} after {of['after']}: {pages}{self._run(of['run'])}"

    def _run(self, run: Any) -> str:
        if run is None:
            return ""
        of = {key: value(run, names.RUN, key) for key in names.RUN}
        place = f"{self._named([of['namespace']])} / {self._named([of['parent']])} / {self._named(of['digests'])}"
        revision = self._named([of["revision"].to_bytes(8, "little")]) if of["revision"] else "0"
        return f"; holds {place} ({_hash(np.frombuffer(of['tokens'], dtype=np.int32))}), revision {revision}"

    def _named(self, digests: list[bytes]) -> str:
        return " ".join(f"#{self._digests.setdefault(digest, len(self._digests))}" for digest in digests)


def _listed(title: str, numbers: Any) -> list[str]:
    return [f"  {title} {_joined(numbers)}"] if len(numbers) else []


def _table(rows: Any, indices: Any, pages: Any, owners: Any, are_new: Any) -> Iterator[str]:
    is_new = are_new.tolist() if are_new.size else [False] * rows.size
    entries = zip(rows.tolist(), indices.tolist(), pages.tolist(), owners.tolist(), is_new, strict=True)
    for row, group in groupby(entries, key=lambda entry: entry[0]):
        yield f"  table of row {row}: " + " ".join(
            f"{index}>{page}@{owner}{'+' * new}" for _, index, page, owner, new in group
        )


def _scores(scores: Any, first: int, count: int) -> str:
    own, top, top_scores = (value(scores, names.SCORES, key)[first : first + count] for key in names.SCORES)
    shown = []
    for one, ids, others in zip(own.tolist(), top.tolist(), top_scores.tolist(), strict=True):
        best = ",".join(f"{token}:{_rounded(score)}" for token, score in zip(ids, others, strict=True))
        shown.append(f"{_rounded(one)}[{best}]")
    return " ".join(shown)


def _rounded(score: float) -> str:
    return f"{score + 0.0:.{DIGITS}f}".replace(f"-0.{'0' * DIGITS}", f"0.{'0' * DIGITS}")


def _fields(what: Any, table: dict[str, str]) -> str:
    return ", ".join(f"{key} {value(what, table, key)}" for key in table)


def _joined(numbers: Any) -> str:
    return " ".join(map(str, np.asarray(numbers, dtype=np.int64).tolist())) or "-"


def _hash(tokens: Any) -> str:
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:8]
