"""JSON schemas of request bodies, put together from the tables that bodies are checked against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hiserve.config.serving import MAX_INT32
from hiserve.core.request import LENGTHS, MAX_LOGPROBS, MAX_STOP_CHARS, NOT_ZERO, RANGES, SamplingParams
from hiserve.server import known_fields
from hiserve.server.body_fields import MAX_NAME_CHARS
from hiserve.server.native_fields import GENERATE, NATIVE_SAMPLING, PER_PROMPT
from hiserve.server.tokens import DETOKENIZE, TOKENIZE
from hiserve.text.body_parser import MAX_PROMPTS
from hiserve.text.chat_request import MAX_FIELDS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ROLES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "maxLength": MAX_NAME_CHARS}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}
# Fields of SamplingParams that are whole numbers; the other numbers may have fractions.
WHOLE = frozenset({"top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"})
# Where a request calls a sampling parameter by another name.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "best_of": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
}


def whole(least: int, most: int = MAX_INT32) -> Schema:
    """Returns the schema of a whole number."""
    return {"type": "integer", "minimum": least, "maximum": most}


def list_of(schema: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": schema, "minItems": least} | ({} if most is None else {"maxItems": most})


def either(*schemas: Schema) -> Schema:
    """Returns the schema of a value that may have several forms."""
    return {"anyOf": list(schemas)}


def filled(properties: dict[str, Schema], *, required: Iterable[str] = (), is_open: bool = True) -> Schema:
    """Returns the schema of an object; null is as good as absent for fields that are not required."""
    required = list(required)
    shown = {name: schema if name in required else _or_null(schema) for name, schema in sorted(properties.items())}
    schema: Schema = {"type": "object", "properties": shown}
    return schema | ({"required": required} if required else {}) | ({} if is_open else {"additionalProperties": False})


def request_bodies(vocab_size: int, *, spec_steps: int, is_strict: bool) -> dict[str, Schema]:
    """Returns the schema of every request body, by name.

    Args:
        vocab_size: Token ids are below it.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
        is_strict: Fields that are not known are refused.
    """
    fields = _fields(vocab_size, spec_steps)

    def body(honoured: frozenset[str], table: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
        neutral = {name: {"enum": list(values)} if values else NULL for name, values in known_fields.REFUSED.items()}
        ignored = dict.fromkeys(known_fields.IGNORED, ANYTHING)
        known = neutral | ignored | {name: table[name] for name in honoured}
        return filled(known, required=required, is_open=not is_strict)

    chat = fields | {"logprobs": FLAG, "max_tokens": whole(1)}
    completion = fields | {"logprobs": either(whole(0, MAX_LOGPROBS), {"const": False})}
    one_request = {"required": ["rid"], "properties": {"rid": NAME | {"minLength": 1}}}
    all_requests = {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}}
    native = fields | _native_fields(vocab_size, body(NATIVE_SAMPLING, fields))
    return {
        "ChatCompletionRequest": body(known_fields.CHAT, chat, ["messages"]),
        "CompletionRequest": body(known_fields.COMPLETIONS, completion, ["prompt"]),
        "GenerateRequest": body(GENERATE, native) | _one_of("text", "input_ids"),
        "TokenizeRequest": body(TOKENIZE, fields | {"prompt": TEXT}) | _one_of("prompt", "messages"),
        "DetokenizeRequest": body(DETOKENIZE, fields | {"tokens": list_of(_token(vocab_size))}, ["tokens"]),
        "AbortRequest": filled({"rid": NAME, "abort_all": FLAG}) | either(one_request, all_requests),
    }


def _one_of(*names: str) -> Schema:
    """Returns the rule that exactly one of these fields is there, and not null."""
    return {"oneOf": [{"required": [name], "properties": {name: {"not": NULL}}} for name in names]}


def _or_null(schema: Schema) -> Schema:
    return schema if schema in (ANYTHING, NULL) else either(schema, NULL)


def _token(vocab_size: int) -> Schema:
    return whole(0, vocab_size - 1)


def _sampling(vocab_size: int, spec_steps: int) -> dict[str, Schema]:
    """Returns the schema of each field of ``SamplingParams``, from the ranges that it checks."""
    schemas: dict[str, Schema] = {}
    for name, (least, most) in RANGES.items():
        is_whole = name in WHOLE
        schema: Schema = {"type": "integer" if is_whole else "number", "minimum": least, "maximum": most}
        if name in NOT_ZERO:
            schema = {"type": "number", "exclusiveMinimum": 0, "maximum": most}
        schemas[name] = schema
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    by_token = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
    schemas |= {
        "stop": either(text, list_of(text, most=LENGTHS["stop"])),
        "stop_token_ids": list_of(_token(vocab_size), most=LENGTHS["stop_token_ids"]),
        "logit_bias": by_token
        | {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "maxProperties": LENGTHS["logit_bias"]},
        "include_stop_str_in_output": FLAG,
        "skip_special_tokens": FLAG,
        "ignore_eos": FLAG,
        "spec": filled(
            {"enabled": FLAG if spec_steps else {"const": False}, "num_steps": whole(0, spec_steps)}, is_open=False
        ),
    }
    assert schemas.keys() == set(SamplingParams.__struct_fields__), "a sampling parameter without a schema"
    return schemas | {name: schemas[ours] for name, ours in OTHER_NAMES.items()} | {"no_stop_trim": FLAG}


def _fields(vocab_size: int, spec_steps: int) -> dict[str, Schema]:
    """Returns the schema of each field of the OpenAI routes and of the tokenizer's, by name."""
    tokens = list_of(_token(vocab_size), least=1)
    text = {"type": "string", "minLength": 1}
    return _sampling(vocab_size, spec_steps) | {
        "add_generation_prompt": FLAG,
        "add_special_tokens": FLAG,
        "cache_salt": NAME,
        "chat_template_kwargs": OBJECT,
        "continue_final_message": FLAG,
        "documents": list_of(OBJECT),
        "echo": FLAG,
        "max_tokens": whole(0),
        "max_new_tokens": whole(0),
        "messages": list_of(_message(), least=1, most=MAX_MESSAGES),
        "model": TEXT,
        "priority": whole(-MAX_INT32),
        "prompt": either(text, tokens, list_of(text, least=1, most=MAX_PROMPTS), list_of(tokens, least=1)),
        "return_token_ids": FLAG,
        "return_token_strs": FLAG,
        "rid": NAME,
        "stream": FLAG,
        "stream_options": filled({"include_usage": FLAG, "continuous_usage_stats": FLAG}),
        "tools": list_of(_tool(), most=MAX_TOOLS),
        "truncate_prompt_tokens": either(whole(1), {"const": -1}),
    }


def _native_fields(vocab_size: int, sampling_params: Schema) -> dict[str, Schema]:
    tokens = list_of(_token(vocab_size), least=1)
    text = {"type": "string", "minLength": 1}
    singles: dict[str, Schema] = {
        "sampling_params": sampling_params,
        "rid": NAME,
        "return_logprob": FLAG,
        "logprob_start_len": whole(-1),
        "top_logprobs_num": whole(0, MAX_LOGPROBS),
    }
    assert singles.keys() == set(PER_PROMPT), "a field of a prompt without a schema"
    return {name: either(schema, list_of(_or_null(schema))) for name, schema in singles.items()} | {
        "text": either(text, list_of(text, least=1, most=MAX_PROMPTS)),
        "input_ids": either(tokens, list_of(tokens, least=1, most=MAX_PROMPTS)),
        "return_text_in_logprobs": FLAG,
    }


def _message() -> Schema:
    part = filled({"type": {"const": "text"}, "text": TEXT}, required=["type", "text"])
    content = either(TEXT, list_of(part, least=1, most=MAX_PARTS))
    fields = {"role": {"enum": list(ROLES)}, "content": content, "name": TEXT}
    return filled(fields, required=["role", "content"]) | {"maxProperties": MAX_FIELDS}


def _tool() -> Schema:
    named = {"name": {"type": "string", "minLength": 1}, "description": TEXT, "parameters": OBJECT}
    function = filled(named, required=["name"])
    return filled({"type": {"const": "function"}, "function": function}, required=["type", "function"])
