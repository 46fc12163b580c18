"""A conversation to one text, by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hiserve.errors import ConfigError, ModelError, RequestError
from hiserve.text.chat import ChatRequest, check_text

# What a template may raise over messages it was not written for.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
# Marks the end of a message that is to be continued: a private-use character, taken out again.
_END = "\ue002"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


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
        self._reserved = {*_RESERVED, *environment.globals}

    @classmethod
    def load(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """Reads ``chat_template.jinja`` or the ``chat_template`` of ``tokenizer_config.json``.

        Args:
            folder: The model's folder; special tokens are read from it in any case.
            override: A file that takes the place of the model's template.

        Returns:
            The template, or None when the model has none.

        Raises:
            ConfigError: ``override`` cannot be read.
            ModelError: Another file cannot be read or the template is not valid.
        """
        config = _read_config(folder / "tokenizer_config.json")
        alone = folder / "chat_template.jinja"
        source: Any = config.get("chat_template")
        if override is not None:
            source = _read_override(override)
        elif alone.is_file():
            source = alone.read_text(encoding="utf-8")
        if isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in tokens.items() if text is not None})

    def render(self, chat: ChatRequest) -> str:
        """Returns the prompt: all messages, and the start of the assistant's reply or the open last message.

        Raises:
            RequestError: The template refuses these messages, or a name of ``template_kwargs`` is taken.
        """
        self._check_names(chat.template_kwargs)
        messages = chat.messages
        if chat.continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        try:
            text = self._template.render(
                **chat.template_kwargs,
                **self._special_tokens,
                messages=messages,
                tools=chat.tools,
                documents=chat.documents,
                add_generation_prompt=chat.add_generation_prompt,
            )
        except TEMPLATE_FAILURES as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        if chat.continue_final_message:
            text, end, _ = text.rpartition(_END)
            if not end:
                raise RequestError(
                    "the chat template does not show the last message, so that it cannot be continued.",
                    param="continue_final_message",
                )
        check_text(text, "messages")
        return text

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in self._reserved or name.endswith(("_token", "_tokens")):
                raise RequestError(
                    f"chat_template_kwargs may not set {name[:100]}; it has its own place.",
                    param=f"chat_template_kwargs.{name[:100]}",
                )


def _read_override(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--chat-template {str(path)!r} cannot be read: {error}.", param="chat_template") from None


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
