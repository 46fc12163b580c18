"""The prompts of a batch: which there are, and their token ids as one array each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import RequestError

Prompt = str | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts of a batch; one alone is a batch of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]


def check_tokens(prompt: Any, vocab_size: int) -> Int32Array:
    """Returns the ids of a prompt as an array, int32 ``[n]``; an int32 array is returned itself.

    Args:
        prompt: Integers, or an array of integers ``[n]``.
        vocab_size: They must be below it.

    Raises:
        RequestError: It holds something else.
    """
    refusal = RequestError(f"token ids must be integers from 0 to {vocab_size - 1}.", param="prompt")
    if isinstance(prompt, np.ndarray):
        ids = prompt
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise refusal
    else:
        try:
            # An array of C takes integers alone, and each in some 20 ns.
            ids = np.asarray(array("q", prompt if isinstance(prompt, list) else list(prompt)))
        except (TypeError, OverflowError):
            raise refusal from None
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise refusal
    return np.ascontiguousarray(ids, dtype=np.int32)
