"""The oracle of a soak: each stream ends once, with the tokens recorded before the first fault."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.bench.soak.users import Reference, SentQuestion
from hiserve.bench.workload import Sample

# A refusal is no failure: the server says when to come again.
REFUSALS = {
    "http 429": "refused, the queue was full (429)",
    "http 503": "refused, the engine was not ready (503)",
}


class Window(msgspec.Struct, frozen=True):
    """From a fault to the first token after it, on the clock of the samples."""

    begin_s: float  # it struck
    end_s: float  # tokens came again; infinite while they do not
    may_fail: bool  # streams that were open in between may end with an error

    def overlaps(self, sample: Sample) -> bool:
        return sample.begin_s <= self.end_s and self.begin_s <= sample.end_s


class StreamVerdict(msgspec.Struct, frozen=True):
    """What became of a request."""

    outcome: str  # in a word or two, for counting
    violation: str = ""  # what must not be; empty if all is well


class StreamOracle:
    """Judges requests that have ended."""

    def __init__(self, references: Sequence[Reference], *, is_exact: bool) -> None:
        self._references = references
        self._is_exact = is_exact

    def judge(self, asked: SentQuestion, windows: Sequence[Window]) -> StreamVerdict:
        """Returns what became of a request that has ended, and whether it may be so beside these faults."""
        sample, reference = asked.sample, self._references[asked.question]
        is_same = sample.output_ids == reference.ids[: len(sample.output_ids)]
        if not is_same and self._is_exact:
            return StreamVerdict("other tokens", f"{sample.output_ids} where {reference.ids} was expected")
        if sample.num_ends > 1:
            return StreamVerdict("ended again", f"the stream ended {sample.num_ends} times")
        if sample.error:
            return _failed(asked, any(window.may_fail and window.overlaps(sample) for window in windows))
        if not sample.finish:
            assert asked.way == "cancelled", f"neither an end nor an error: {sample}"
            return StreamVerdict("left by the user")
        if not is_same:
            return StreamVerdict("answered, other tokens")
        if sample.finish == "abort":
            return StreamVerdict("cut at the server's time limit")
        if self._is_exact and (len(sample.output_ids), sample.finish) != (len(reference.ids), reference.finish):
            got = f"{len(sample.output_ids)} tokens ({sample.finish})"
            return StreamVerdict("cut short", f"{got} where {len(reference.ids)} ({reference.finish}) were expected")
        return StreamVerdict("answered")


def judge_bad(sample: Sample) -> StreamVerdict:
    if sample.error:
        return StreamVerdict("malformed, lost", f"{sample.error}: {sample.detail}")
    if refusal := REFUSALS.get(f"http {sample.status}"):
        return StreamVerdict(refusal)
    if 400 <= sample.status < 500:
        return StreamVerdict("malformed, told so")
    return StreamVerdict("malformed, mistaken", f"a malformed request was answered {sample.status}")


def _failed(asked: SentQuestion, is_excused: bool) -> StreamVerdict:
    sample = asked.sample
    if sample.error in REFUSALS and not sample.output_ids:
        return StreamVerdict(REFUSALS[sample.error])
    if sample.error == "error event" and is_excused:
        return StreamVerdict("failed by a fault")
    if asked.way == "slow" and sample.error in ("connection", "incomplete"):
        return StreamVerdict("slow reader cut off")
    return StreamVerdict(sample.error, f"{sample.error}: {sample.detail}")
