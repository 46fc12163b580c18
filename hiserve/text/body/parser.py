"""Request bodies: JSON to Python. Large bodies are reduced to few values before their fields are handled."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.body.chat import join_parts
from hiserve.text.body.json import bare, check_text

MAX_PROMPTS = 1024
# Values of a body. Token ids are not counted, and a content in parts counts as one value.
MAX_BODY_VALUES = 2**16
# A body within all of these is parsed in a few milliseconds.
QUICK_BYTES = 2**20
QUICK_VALUES = 2**16
QUICK_STRINGS = 2**13
TOKEN_FIELDS = ("prompt", "input_ids", "tokens", "resume_token_ids")

_IDS = 1  # msgpack's type of token ids, int32


class Sizes(msgspec.Struct, frozen=True):
    """Limits of token ids and prompts.

    Attributes:
        vocab_size: Ids are below it.
        max_model_len: Tokens of the longest prompt.
    """

    vocab_size: int
    max_model_len: int


def is_quick(raw: bytes) -> bool:
    """Whether a body can be parsed in a few milliseconds, by its length and the number of its values.

    Commas and brackets within strings are not counted.
    """
    if len(raw) > QUICK_BYTES or raw.count(b'"') - raw.count(b'\\"') > 2 * QUICK_STRINGS:
        return False
    if raw.count(b",") <= QUICK_STRINGS and raw.count(b"[") + raw.count(b"{") <= QUICK_STRINGS:
        return True
    outside = bare(raw)
    return outside.count(b",") <= QUICK_VALUES and outside.count(b"[") + outside.count(b"{") <= QUICK_STRINGS


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parses a request body.

    Raises:
        RequestError: The body is not a JSON object.
    """
    try:
        body = json.loads(raw)
    except RecursionError:
        raise RequestError("the body is nested too deeply.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        fault = f"the body is not valid JSON: byte {error.start} is not {error.encoding}."
        raise RequestError(fault, code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}.", code="invalid_json") from None
    except ValueError:  # Python's bound on the digits of a whole number
        raise RequestError("the body has a number of too many digits.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object.", code="invalid_json")
    return body


def check_num_prompts(num_prompts: int, param: str) -> None:
    """Refuses too many prompts.

    Raises:
        RequestError: There are more than ``MAX_PROMPTS``.
    """
    if num_prompts > MAX_PROMPTS:
        raise RequestError(f"{param} has {num_prompts} prompts; the most is {MAX_PROMPTS}.", param=param)


def parse_prompt(prompt: Any, *, vocab_size: int, param: str = "prompt") -> str | Int32Array:
    """Returns one prompt: a non-empty text, or token ids, int32 ``[n]`` with n > 0.

    ``prompt`` is a string, a list of token ids, or the array that ``unpack_slim`` returns.

    Raises:
        RequestError: The prompt is empty or malformed.
    """
    if isinstance(prompt, np.ndarray):
        return prompt
    if not isinstance(prompt, str | list):
        raise RequestError(f"{param} must be a string or a list of token ids.", param=param)
    if not prompt:
        raise RequestError(f"{param} is empty; give at least one token.", param=param)
    if isinstance(prompt, str):
        check_text(prompt, param)
        return prompt
    if set(map(type, prompt)) != {int}:
        raise RequestError(f"{param} is a list of something else than token ids (integers).", param=param)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        shown = "a negative id" if low < 0 else "an id that is too large"
        raise RequestError(f"{param} has {shown}; token ids must be between 0 and {vocab_size - 1}.", param=param)
    return np.array(array("i", prompt), dtype=np.int32)


def slim(raw: bytes, sizes: Sizes, *, is_chat: bool = True) -> bytes:
    """Parses a large body and encodes it in few values, for ``unpack_slim``.

    Lists of token ids are checked and packed; contents of a chat in parts are joined.

    Raises:
        RequestError: The body is not a JSON object, a value is malformed, or the packed body still has too many values.
    """
    body = parse_body(raw)
    for name in TOKEN_FIELDS:
        value = body.get(name)
        if isinstance(value, list) and value:
            body[name] = _packed(value, sizes, name, may_be_long=body.get("truncate_prompt_tokens") is not None)
    if is_chat and isinstance(messages := body.get("messages"), list):
        join_parts(messages)
    _check_number(body)
    try:
        return msgspec.msgpack.encode(body)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"the body has what no field takes: {str(error)[:100]}. Texts must be valid Unicode, numbers have at most 64 bits."
        ) from None


def unpack_slim(packed: bytes) -> dict[str, Any]:
    """Returns the body that ``slim`` packed, lists of token ids as int32 ``[n]``."""
    body: dict[str, Any] = msgspec.msgpack.decode(packed, ext_hook=_unpack_ids)
    return body


def _packed(value: list[Any], sizes: Sizes, name: str, *, may_be_long: bool) -> Any:
    """Packs token ids, or each list of them; other values are returned unchanged."""
    if value[0] is None or isinstance(value[0], list):
        check_num_prompts(len(value), name)
        return [_packed(each, sizes, name, may_be_long=may_be_long) if isinstance(each, list) and each else each
                for each in value]  # fmt: skip
    if isinstance(value[0], str):
        return value
    if len(value) > sizes.max_model_len and not may_be_long and name != "tokens":
        raise ContextLengthError.of(f"{len(value)} tokens", sizes.max_model_len, name)
    ids = parse_prompt(value, vocab_size=sizes.vocab_size, param=name)
    assert isinstance(ids, np.ndarray), "ids of a list"
    return msgspec.msgpack.Ext(_IDS, ids.tobytes())


def _unpack_ids(kind: int, data: memoryview) -> Int32Array:
    assert kind == _IDS, f"msgpack extension {kind}"
    return np.frombuffer(data, dtype=np.int32)


def _check_number(body: dict[str, Any]) -> None:
    """Refuses a body with too many values; the error names the field with the most."""
    numbers = {name: _num_values(value) for name, value in body.items()}
    if sum(numbers.values()) > MAX_BODY_VALUES:
        most = max(numbers, key=lambda name: numbers[name])
        raise RequestError(
            f"the body has more than {MAX_BODY_VALUES} values, most of them in {most[:100]}. Send fewer.",
            param=most[:100],
        )


def _num_values(value: Any) -> int:
    number, waiting = 0, [value]
    while waiting and number <= MAX_BODY_VALUES:
        inner = waiting.pop()
        number += 1
        if isinstance(inner, list | dict):
            number += len(inner)
            if number <= MAX_BODY_VALUES:
                waiting += inner.values() if isinstance(inner, dict) else inner
    return number
