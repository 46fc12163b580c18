"""Reads request bodies field by field; every complaint names its field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from hiserve.config import MAX_INT32
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import NotFoundError, RequestError
from hiserve.text.chat import check_text

# Fields that would change the answer and that hiserve does not serve yet, with the values that change
# nothing. Null never does. Any other value is refused: no such field is silently ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ebnf": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a body says beside its prompt.

    Attributes:
        sampling: How to sample and when to stop.
        limit_field: The field that ``max_tokens`` came from, for error messages.
        is_stream: Answer with events.
        has_usage: End the events with the usage.
        has_running_usage: Put the usage so far into every event; only with ``has_usage``.
        has_token_ids: Return prompt and generated token ids.
    """

    sampling: SamplingParams
    limit_field: str
    is_stream: bool
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parses a request body.

    Raises:
        RequestError: It is not a JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object.", code="invalid_json")
    return body


def parse_options(body: dict[str, Any]) -> Options:
    """Reads everything but the prompt and the model.

    Args:
        body: The parsed body. Unknown fields are ignored.

    Raises:
        RequestError: A field is malformed or not supported.
    """
    for name, neutral in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, allowed) for allowed in neutral):
            raise RequestError(f"{name} is not supported yet.", param=name)
    is_new_name = body.get("max_completion_tokens") is not None
    limit_field = "max_completion_tokens" if is_new_name else "max_tokens"
    max_tokens = _integer(body, limit_field)
    if max_tokens is not None and not 1 <= max_tokens <= MAX_INT32:
        raise RequestError(f"{limit_field} must be between 1 and {MAX_INT32}.", param=limit_field)
    stream_options = body.get("stream_options")
    if stream_options is None:
        stream_options = {}
    if not isinstance(stream_options, dict):
        raise RequestError("stream_options must be an object.", param="stream_options")
    sampling = SamplingParams(
        temperature=_number(body, "temperature", 1.0),
        top_k=_integer(body, "top_k") or 0,
        top_p=_number(body, "top_p", 1.0),
        seed=_integer(body, "seed"),
        max_tokens=max_tokens,
        ignore_eos=_flag(body, "ignore_eos"),
    )
    return Options(
        sampling=sampling,
        limit_field=limit_field,
        is_stream=_flag(body, "stream"),
        has_usage=_flag(stream_options, "include_usage", "stream_options."),
        has_running_usage=_flag(stream_options, "continuous_usage_stats", "stream_options."),
        has_token_ids=_flag(body, "return_token_ids"),
    )


def check_model(body: dict[str, Any], served: str) -> None:
    """Checks that the body names the served model, or none.

    Raises:
        NotFoundError: It names another one.
        RequestError: The name is not a string.
    """
    name = body.get("model")
    if name is None or name == served:
        return
    if not isinstance(name, str):
        raise RequestError("model must be a string.", param="model")
    check_text(name, "model")
    raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {served!r}.", param="model")


def parse_prompt(body: dict[str, Any], *, vocab_size: int) -> str | Int32Array:
    """Reads the prompt of a text completion: a string, or token ids.

    A list with one prompt in it counts as that prompt.

    Args:
        body: The parsed body.
        vocab_size: Token ids must be below it.

    Returns:
        A non-empty text, or int32 ``[n]`` with n > 0.

    Raises:
        RequestError: The prompt is missing, empty or malformed.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError("several prompts in one request are not supported yet.", param="prompt")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise RequestError("prompt must be a string or a list of token ids.", param="prompt")
    if not prompt:
        raise RequestError("prompt is empty; give at least one token.", param="prompt")
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        return prompt
    if not all(type(token) is int for token in prompt):
        raise RequestError("prompt is a list of something else than token ids (integers).", param="prompt")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        shown = "a negative id" if low < 0 else "an id that is too large"
        raise RequestError(f"prompt has {shown}; token ids must be between 0 and {vocab_size - 1}.", param="prompt")
    return np.array(prompt, dtype=np.int32)


def _number(values: dict[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_INT32 <= value <= MAX_INT32:  # also refuses NaN
        raise RequestError(f"{name} must be a number.", param=name)
    return float(value)


def _integer(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number.", param=name)
    return value


def _flag(values: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = values.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{prefix}{name} must be true or false.", param=prefix + name)
    return value


def _is_same(value: Any, neutral: Any) -> bool:
    """Compares as JSON does: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
