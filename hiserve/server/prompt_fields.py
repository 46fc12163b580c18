"""Reads the prompts of a text completion: texts, or lists of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import RequestError
from hiserve.text.chat import check_text

MAX_PROMPTS = 1024
MAX_CHOICES = 4096


def parse_prompts(body: dict[str, Any], *, vocab_size: int, num_per_prompt: int) -> list[str | Int32Array]:
    """Reads one prompt, or a list of them.

    Args:
        body: The parsed body.
        vocab_size: Token ids must be below it.
        num_per_prompt: Choices of each prompt.

    Returns:
        Non-empty texts, or int32 ``[n]`` with n > 0.

    Raises:
        RequestError: A prompt is missing, empty or malformed, or there are too many.
    """
    value = body.get("prompt")
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} prompts; the most is {MAX_PROMPTS}.", param="prompt")
    if len(prompts) * num_per_prompt > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {num_per_prompt} choices each are too many; the most is {MAX_CHOICES} in all.",
            param="n",
        )
    return [parse_prompt(prompt, vocab_size=vocab_size) for prompt in prompts]


def parse_prompt(prompt: Any, *, vocab_size: int, param: str = "prompt") -> str | Int32Array:
    """Reads one prompt.

    Args:
        prompt: A string, or a list of token ids.
        vocab_size: Token ids must be below it.
        param: The field it came from.

    Returns:
        A non-empty text, or int32 ``[n]`` with n > 0.

    Raises:
        RequestError: The prompt is missing, empty or malformed.
    """
    if not isinstance(prompt, str | list):
        raise RequestError(f"{param} must be a string or a list of token ids.", param=param)
    if not prompt:
        raise RequestError(f"{param} is empty; give at least one token.", param=param)
    if isinstance(prompt, str):
        check_text(prompt, param)
        return prompt
    if not all(type(token) is int for token in prompt):
        raise RequestError(f"{param} is a list of something else than token ids (integers).", param=param)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        shown = "a negative id" if low < 0 else "an id that is too large"
        raise RequestError(f"{param} has {shown}; token ids must be between 0 and {vocab_size - 1}.", param=param)
    return np.array(prompt, dtype=np.int32)
