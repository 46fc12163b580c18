"""Chat messages to one text, by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hiserve.errors import ModelError, RequestError

Message = dict[str, str]
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_TEXT = ("tool_calls", "function_call", "audio")
# What a template may raise over messages it was not written for.
TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


class ChatTemplate:
    """A compiled chat template.

    It comes with the model, so it runs in a sandbox; the settings and helpers are those that templates
    are written for (Hugging Face transformers).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles the template.

        Args:
            source: Jinja source.
            special_tokens: Names such as ``bos_token`` that the template may use.

        Raises:
            ModelError: The source is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: line {error.lineno}: {error}.") from None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Reads ``chat_template.jinja`` or the ``chat_template`` of ``tokenizer_config.json``.

        Returns:
            The template, or None when the model has none.

        Raises:
            ModelError: A file cannot be read or the template is not valid.
        """
        config = _read_config(folder / "tokenizer_config.json")
        alone = folder / "chat_template.jinja"
        source = alone.read_text(encoding="utf-8") if alone.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in tokens.items() if text is not None})

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the prompt: all messages, and the start of the assistant's reply.

        Raises:
            RequestError: The template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except TEMPLATE_FAILURES as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None


def parse_messages(value: Any) -> list[Message]:
    """Checks the ``messages`` of a request and brings their contents to plain text.

    A content is a string or a list of text parts, which are joined. ``developer`` becomes ``system``.
    Other fields of a message are kept where they are strings (``name``, ``tool_call_id``).

    Raises:
        RequestError: Something is malformed or not supported; ``param`` says where.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message.", param="messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object with role and content.", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    for name in NOT_TEXT:
        if value.get(name):
            raise RequestError(f"{where}.{name} is not supported yet.", param=f"{where}.{name}")
    kept = {name: text for name, text in value.items() if isinstance(text, str)}
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _parse_content(value.get("content"), f"{where}.content")
    for name, text in kept.items():
        check_text(text, f"{where}.{name}" if name in value else where)
    return kept


def _parse_content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind if isinstance(kind, str) and kind.isidentifier() else "this part"
            raise RequestError(f"{where}[{i}]: {shown} is not supported; use text parts.", param=f"{where}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}].text must be a string.", param=f"{where}[{i}].text")
        texts.append(part["text"])
    return "".join(texts)


def check_text(text: str, param: str) -> None:
    """Refuses lone surrogates, which JSON can spell but UTF-8 cannot.

    Raises:
        RequestError: There is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} is not valid Unicode: a lone surrogate at character {error.start}.", param=param
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not valid JSON: {error}.", param="model") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not a JSON object.", param="model")
    return config


def _token_text(value: Any) -> str | None:
    """Reads a special token in both spellings: a string, or an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own ``tojson`` escapes HTML; prompts need the plain form."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
