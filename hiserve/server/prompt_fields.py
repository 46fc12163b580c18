"""Reads the prompts of a text completion: texts, or lists of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import RequestError
from hiserve.text.body_parser import MAX_PROMPTS, parse_prompt

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
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list | np.ndarray) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} prompts; the most is {MAX_PROMPTS}.", param="prompt")
    if len(prompts) * num_per_prompt > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {num_per_prompt} choices each are too many; the most is {MAX_CHOICES} in all.",
            param="n",
        )
    return [parse_prompt(prompt, vocab_size=vocab_size) for prompt in prompts]
