"""The same tokens: replies of two engines that are equal, or as likely within the rounding of batch shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from hiserve.bench.spec_engine import SpecEngine, Tokens
from hiserve.core.request import SamplingParams

EPSILON_FACTOR = 8
MAX_SHARE = 0.005
Verdict = Literal["same", "within the margin", "not judged", "different"]
ROUNDING = ("float32", "bfloat16", "float16")  # types that round with the shape of a batch


class Margin(msgspec.Struct, frozen=True):
    """The distance of emitted tokens from the reference's best."""

    epsilon: float  # what is allowed: 8 times the largest difference between scores of two batch shapes
    worst: float  # largest shortfall of an emitted token's score
    num_needed: int  # positions where the emitted token is not the reference's best
    num_positions: int  # all positions

    @property
    def is_near(self) -> bool:
        return self.worst <= self.epsilon

    @property
    def is_rare(self) -> bool:
        """At most 0.5 % of the positions need it: of few, none may."""
        return self.num_needed <= MAX_SHARE * self.num_positions

    @property
    def is_kept(self) -> bool:
        """Every token is within epsilon, and at most 0.5 % of them need it."""
        return self.is_near and self.is_rare


def join(margins: Sequence[Margin]) -> Margin:
    """One verdict over several rows, of one epsilon."""
    return Margin(
        epsilon=margins[0].epsilon,
        worst=max(each.worst for each in margins),
        num_needed=sum(each.num_needed for each in margins),
        num_positions=sum(each.num_positions for each in margins),
    )


class Equality(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison.

    Attributes:
        verdict: ``not judged`` are drawn tokens that differ, of a type that rounds coarsely: their noise is not known
            here.
        first_difference: Index of the first reply that differs, and of the token in it; None without one.
    """

    verdict: Verdict
    num_replies: int  # compared
    num_tokens: int  # of all of them
    num_differing: int = 0  # of them, those that are not the same tokens
    first_difference: tuple[int, int] | None = None
    margin: Margin | None = None  # of differing replies of greedy decoding; None where it was not needed

    @property
    def is_kept(self) -> bool:
        """Nothing speaks against it alone; how rare near ties are is judged over many cases (``over_all``)."""
        return self.verdict != "different"


def over_all(found: Sequence[Equality]) -> Margin | None:
    """Returns the margin of all tokens of several comparisons; None where none was needed."""
    needed = [each.margin for each in found if each.margin is not None]
    if not needed:
        return None
    return msgspec.structs.replace(join(needed), num_positions=sum(each.num_tokens for each in found))


def are_kept(found: Sequence[Equality]) -> bool:
    """Whether every comparison is kept, and near ties are rare over all of them."""
    margin = over_all(found)
    return all(each.is_kept for each in found) and (margin is None or margin.is_rare)


class EqualityChecker:
    """Compares replies of speculation with those of plain decoding.

    float64 must give the same tokens. Where a type rounds with the shape of a batch, near ties may flip; then greedy
    replies that differ are read to the plain engine, which scores each of their tokens: all must be within the margin.
    Its share of positions is a matter of all comparisons together: one may be of few tokens.
    """

    def __init__(self, plain: SpecEngine) -> None:
        self._plain = plain
        self._difference: float | None = None

    def compare(
        self, prompts: Sequence[Tokens], expected: Sequence[Tokens], replies: Sequence[Tokens], temperature: float
    ) -> Equality:
        """Returns the verdict on replies to prompts, all drawn at one temperature, against those of plain decoding."""
        num_tokens = sum(map(len, replies))
        differing = [i for i, pair in enumerate(zip(expected, replies, strict=True)) if pair[0] != pair[1]]
        if not differing:
            return Equality(verdict="same", num_replies=len(replies), num_tokens=num_tokens)
        first = differing[0]
        fields: dict[str, Any] = {
            "num_replies": len(replies),
            "num_tokens": num_tokens,
            "num_differing": len(differing),
            "first_difference": (first, _first_difference(expected[first], replies[first])),
        }
        dtype = self._plain.settings.model.dtype
        if dtype not in ROUNDING or (temperature and dtype == "float32"):
            return Equality(verdict="different", **fields)
        if temperature:
            return Equality(verdict="not judged", **fields)
        margin = self._margin([prompts[i] for i in differing], [replies[i] for i in differing], num_tokens)
        return Equality(verdict="within the margin" if margin.is_near else "different", margin=margin, **fields)

    def _margin(self, prompts: Sequence[Tokens], replies: Sequence[Tokens], num_positions: int) -> Margin:
        """Scores replies that differ, out of ``num_positions`` tokens; the rest are the engine's own."""
        if self._difference is None:
            self._difference = self._shape_difference(prompts, len(replies[0]))
        scores = [each for row in self._read(prompts, replies) for each in row]
        short = [max(each.top.values()) - each.logprob for each in scores]
        return Margin(
            epsilon=EPSILON_FACTOR * self._difference,
            worst=max(short),
            num_needed=sum(gap > 0 for gap in short),
            num_positions=num_positions,
        )

    def _shape_difference(self, prompts: Sequence[Tokens], max_tokens: int) -> float:
        """Returns the largest difference between scores of tokens as they were drawn, and as they are read."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        drawn = [output.outputs[0] for output in self._plain.generate(list(prompts), params)]
        read = self._read(prompts, [choice.token_ids for choice in drawn])
        pairs = [
            pair for choice, row in zip(drawn, read, strict=True) for pair in zip(choice.logprobs, row, strict=True)
        ]
        return float(max(abs(one.logprob - other.logprob) for one, other in pairs))

    def _read(self, prompts: Sequence[Tokens], replies: Sequence[Tokens]) -> list[list[Any]]:
        """Returns the score of every token of replies, computed as a prompt's are."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
        outputs = self._plain.generate(texts, params)
        return [output.prompt_logprobs[len(prompt) :] for output, prompt in zip(outputs, prompts, strict=True)]


def _first_difference(expected: Tokens, reply: Tokens) -> int:
    pairs = zip(expected, reply, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(expected), len(reply)))
