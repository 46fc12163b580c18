"""The parameters of a request, and the reasons why it ends."""

from __future__ import annotations

import secrets
from enum import IntEnum
from typing import Annotated, Literal

import msgspec

from hiserve.config.options import MAX_SPEC_STEPS
from hiserve.config.serving import MAX_INT32
from hiserve.core.digest import namespace_digest
from hiserve.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024

# Least and most value of each number; those of whole numbers are whole.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, MAX_INT32),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NOT_ZERO = {"top_p": "use temperature 0 for greedy", "repetition_penalty": "1 is no penalty"}
GrammarKind = Literal["json", "json_lenient", "regex", "choice", "lark", "ebnf", "either", "either_lenient", "any"]
# Of kinds with a JSON schema, the one without the keywords that no mask can hold.
LENIENT: dict[GrammarKind, GrammarKind] = {"json": "json_lenient", "either": "either_lenient"}
LENGTHS = {"stop": MAX_STOPS, "stop_token_ids": MAX_STOP_TOKENS, "logit_bias": MAX_BIASES}


class FinishReason(IntEnum):
    """The reason why a request ended. Travels as an integer; ``text`` is OpenAI's word."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    COMPLETE = 4  # a stop without a stop token: the grammar allows no more. ``TextOutput`` says STOP.

    @property
    def text(self) -> str | None:
        """OpenAI's ``finish_reason``; None while the request runs."""
        if self is FinishReason.COMPLETE:
            return FinishReason.STOP.text
        return None if self is FinishReason.RUNNING else self.name.lower()


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The language of a reply."""

    # ``json`` (a JSON schema), ``json_lenient`` (the same without the keywords that no mask can hold), ``regex``,
    # ``choice`` (a JSON list of texts), ``lark``, ``ebnf`` (GBNF, or Lark), ``any`` (all tokens; no text), ``either`` (a
    # JSON list of kinds and texts, of which the reply is of one), ``either_lenient``
    kind: GrammarKind
    text: str  # as the kind says
    digest: bytes  # of all
    after: str = ""  # the mark that ends the thought in which the reply begins; the language is that of the rest
    # The mark that opens this thought, if the reply may begin with one. It begins with a token, but for ``any``.
    opening: str = ""
    budget: int | None = None  # most tokens of the thoughts
    header: str = ""  # the marks between thought and text, where replies are messages; calls (``lark``) have their own

    @classmethod
    def of(
        cls,
        kind: GrammarKind,
        text: str,
        after: str = "",
        opening: str = "",
        budget: int | None = None,
        header: str = "",
    ) -> Grammar:
        """Returns the grammar with its digest."""
        more = [] if budget is None else [str(budget)]
        more += ["header", header] if header else []
        digest = namespace_digest(kind, text, after, opening, *more)
        return cls(kind, text, digest, after, opening, budget, header)

    def as_kind(self, kind: GrammarKind) -> Grammar:
        """Returns the grammar with its text read as another kind."""
        if kind == self.kind:
            return self
        return Grammar.of(kind, self.text, self.after, self.opening, self.budget, self.header)

    def either(self, *others: Grammar) -> Grammar:
        """Returns the grammar of the replies of this one and of others; each is of a whole reply."""
        parts = [(each.kind, each.text) for each in (self, *others)]
        return Grammar.of("either", msgspec.json.encode(parts).decode())

    @property
    def alternatives(self) -> list[Grammar]:
        """The grammars of which a reply is of one; this one, where it is of no several."""
        if self.kind not in ("either", "either_lenient"):
            return [self]
        is_lenient = self.kind == "either_lenient"
        parts: list[tuple[GrammarKind, str]] = msgspec.json.decode(self.text)
        return [Grammar.of(LENIENT.get(kind, kind) if is_lenient else kind, text) for kind, text in parts]

    def within(self, budget: int) -> Grammar:
        """Returns the grammar with at most so many tokens of thoughts."""
        return Grammar.of(self.kind, self.text, self.after, self.opening, budget, self.header)


# Prefixes of a prompt, of so many tokens each, that the cache evicts last for so many seconds after their last use.
Retain = tuple[tuple[int, int], ...]
MAX_RETAIN_S = 86_400  # no request can ask for more


class SpecParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request's use of the engine's speculation, which does not change its output.

    Attributes:
        enabled: False verifies no drafts; True requires an engine that speculates; None leaves it to the engine.
        num_steps: Most drafts verified at once; None leaves it to the engine. Range 0 to 15.
    """

    enabled: bool | None = None
    num_steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_SPEC_STEPS)] | None = None

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            RequestError: ``num_steps`` is.
        """
        if self.num_steps is not None and not 0 <= self.num_steps <= MAX_SPEC_STEPS:
            raise RequestError(
                f"spec.num_steps is {self.num_steps}; it must be between 0 and {MAX_SPEC_STEPS}.",
                param="spec.num_steps",
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The choice of the next token, the end of the reply, and the reported probabilities.

    A token's logit is changed in this order: ``logit_bias``, penalties, ``min_tokens``, temperature,
    then top-k, top-p and min-p, each over what the one before it left.
    """

    temperature: float = 1.0  # 0 is greedy. Range 0 to 100.
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this. Range (0, 1].
    min_p: float = 0.0  # keep tokens at least this likely, relative to the likeliest. Range 0 to 1.
    # Divides positive and multiplies negative logits of every token in prompt or output; 1 is none. Range (0, 100].
    # (Keskar et al., CTRL, 2019.)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output. Range -2 to 2.
    frequency_penalty: float = 0.0  # subtracted once for each time a token stands in the output. Range -2 to 2.
    logit_bias: dict[int, float] | None = None  # added to the logits of these token ids, -100 to 100; at most 1,024
    seed: int | None = None  # fixes the random numbers. Range -2**63 to 2**63 - 1. None draws one when accepted.
    n: int = 1  # choices to generate for one prompt, 1 to 64. Each has random numbers of its own.
    max_tokens: int | None = None  # tokens to generate at most; None means up to the context limit
    min_tokens: int = 0  # end and stop tokens cannot be chosen before this many; stop texts do not count before
    # Texts that end the reply; the reply ends before them. At most 16, of 4,096 characters each.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the reply, like its end tokens. At most 64.
    include_stop_str_in_output: bool = False  # leave the stop text or token in the reply's text
    skip_special_tokens: bool = True  # leave special tokens out of the text
    ignore_eos: bool = False  # go on after an end-of-sequence token (for benchmarks)
    # Report the log-probability of each generated token, and of this many likeliest ones, 0 to 20. They are the
    # model's own, before everything above.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt. The prompt is then computed whole.
    spec: SpecParams | None = None  # how to use the engine's speculation; None leaves it to the engine
    # The reply is a text of this language, or cut by a limit or a stop; ``min_tokens`` and ``ignore_eos`` then hold
    # no end back. None is any text.
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            RequestError: A field is out of range or not a number.
        """
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # also refuses NaN
                raise RequestError(f"{name} is {value}; it must be between {least:g} and {most:g}.", param=name)
        for name, remedy in NOT_ZERO.items():
            if getattr(self, name) == 0:
                raise RequestError(f"{name} is 0; it must be greater than 0 ({remedy}).", param=name)
        for name, most in LENGTHS.items():
            if (number := len(getattr(self, name) or ())) > most:
                raise RequestError(f"{name} has {number} entries; the most is {most}.", param=name)
        if not all(self.stop):
            raise RequestError("stop has an empty text; leave it out.", param="stop")
        if (number := max(map(len, self.stop), default=0)) > MAX_STOP_CHARS:
            raise RequestError(f"stop has a text of {number} characters; the most is {MAX_STOP_CHARS}.", param="stop")
        if not all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values()):
            raise RequestError("logit_bias must be between -100 and 100 for every token.", param="logit_bias")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}).", param="min_tokens"
            )

    def seeded(self) -> SamplingParams:
        """Returns the same with a seed from 0 to ``MAX_SEED``: the lower 63 bits of its own, or drawn evenly where there is none."""
        if self.seed is not None and self.seed >= 0:
            return self
        seed = secrets.randbelow(MAX_SEED + 1) if self.seed is None else self.seed & MAX_SEED
        return msgspec.structs.replace(self, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that all token ids are below ``vocab_size``.

        Raises:
            RequestError: One in ``stop_token_ids`` or ``logit_bias`` is not.
        """
        for name in ("stop_token_ids", "logit_bias"):
            if not all(0 <= token < vocab_size for token in getattr(self, name) or ()):
                raise RequestError(f"{name} must hold token ids between 0 and {vocab_size - 1}.", param=name)

    def check_spec(self, spec_steps: int) -> None:
        """Checks ``spec`` against an engine that verifies up to ``spec_steps`` drafts at once, 0 without speculation.

        Raises:
            RequestError: ``spec`` asks for speculation where there is none, or for more drafts.
        """
        asked = self.spec or SpecParams()
        if not spec_steps and (asked.enabled or asked.num_steps):
            param = "spec.enabled" if asked.enabled else "spec.num_steps"
            raise RequestError(
                f"{param} asks for speculation, and there is none here. Leave it out, or start with --spec.",
                param=param,
            )
        if (asked.num_steps or 0) > spec_steps:
            raise RequestError(
                f"spec.num_steps is {asked.num_steps}; the most here is {spec_steps}. Lower it, or start with a larger "
                "--spec-steps.",
                param="spec.num_steps",
            )

    def most_drafts(self, spec_steps: int, max_depth: int = 0) -> int:
        """Returns the most drafts to verify at once; ``spec_steps`` if the request leaves it to the engine.

        Masks of a grammar follow chains: where drafts may be trees, a request with a grammar has a chain of ``max_depth`` at most.
        """
        if max_depth and self.grammar is not None:
            spec_steps = min(spec_steps, max_depth)
        if self.spec is None:
            return spec_steps
        if self.spec.enabled is False:
            return 0
        return spec_steps if self.spec.num_steps is None else min(spec_steps, self.spec.num_steps)
