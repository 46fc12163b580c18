"""What a caller asks for: sampling parameters, and why a request ended."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from hiserve.config import MAX_INT32
from hiserve.errors import RequestError

MAX_SEED = 2**63 - 1


class FinishReason(IntEnum):
    """Why a request ended. Travels as an integer; ``text`` is OpenAI's word."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3

    @property
    def text(self) -> str | None:
        """OpenAI's ``finish_reason``; None while the request runs."""
        return None if self is FinishReason.RUNNING else self.name.lower()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen and when to stop.

    Attributes:
        temperature: 0 is greedy. Range 0 to 100.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this. Range (0, 1].
        seed: Fixes the random numbers. None draws a seed when the request is accepted.
        max_tokens: Tokens to generate at most; None means up to the context limit.
        ignore_eos: Go on after an end-of-sequence token (for benchmarks).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuses values out of range, with the field's name.

        Raises:
            RequestError: A field is out of range or not a number.
        """
        bounds = (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0))
        for name, low, high in bounds:
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}.", param=name)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be greater than 0 (use temperature 0 for greedy).", param="top_p")
        if not -1 <= self.top_k <= MAX_INT32:
            raise RequestError(f"top_k is {self.top_k}; it must be -1, 0 or positive.", param="top_k")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_INT32:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1.", param="max_tokens")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must be between 0 and 2**63 - 1.", param="seed")
