"""Renders a conversation to one text by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec

from hiserve.errors import ConfigError, ContextLengthError, ModelError, RequestError
from hiserve.text.body.json import check_text
from hiserve.text.conversation import Call, Conversation, Message, Result, Role, Text, Thought, Turn
from hiserve.text.template.budget import MAX_WORK_CHARS, RenderBudget, RenderBudgetError
from hiserve.text.template.sandbox import BoundedEnvironment

RENDER_S = 5.0
# Errors that a template may raise for messages it was not written for.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
TOO_SLOW = "template_too_slow"
# Marks the end of a message that is to be continued: a private-use character, removed again.
_END = "\ue002"
PROBE = "hiserve_probe"
PROBE_ID = "123456789"  # nine characters, which one family demands
_TOOL: dict[str, Any] = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {}}}
# Names that families have for the thought of a message.
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


class _Named(msgspec.Struct):
    """One of several templates in ``tokenizer_config.json``."""

    name: str
    template: str


class Sources(msgspec.Struct, frozen=True):
    """The arguments of ``ChatTemplate``."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str | None
    encoder: str = ""  # that of ``encoders.ENCODERS`` in its place; empty without


class ChatTemplate:
    """A compiled chat template.

    The model's authors wrote it, so it runs in a sandbox with limits of time and size. Thread-safe.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        """Compiles the template.

        Args:
            source: Jinja source.
            special_tokens: Names such as ``bos_token`` that the template may use.
            tool_source: Replaces ``source`` when tools are given.

        Raises:
            ModelError: A source is not valid Jinja.
        """
        self.sources = Sources(source, dict(special_tokens or {}), tool_source)
        self._environment = BoundedEnvironment()
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self._template = self._compiled(source)
        self._tool_template = self._template if tool_source is None else self._compiled(tool_source)
        self._special_tokens = self.sources.special_tokens
        self._reserved = {*_RESERVED, *self._environment.globals}

    @classmethod
    def of(cls, sources: Sources) -> ChatTemplate:
        """Compiles a template from the sources of another."""
        return cls(sources.source, sources.special_tokens, sources.tool_source)

    @classmethod
    def load(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """Reads ``chat_template.jinja`` or the ``chat_template`` of ``tokenizer_config.json``; None without either.

        Of several named templates, ``default`` and ``tool_use`` are used. The file ``override`` replaces them all;
        special tokens are always read from the model's folder.

        Raises:
            ConfigError: ``override`` cannot be read.
            ModelError: Another file cannot be read or a template is not valid.
        """
        config = _read_config(folder / "tokenizer_config.json")
        if override is not None:
            sources = {"default": _read_override(override)}
        else:
            sources = _read_sources(folder, config.get("chat_template"))
        if "default" not in sources:
            return None
        tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        known = {name: text for name, text in tokens.items() if text is not None}
        return cls(sources["default"], known, sources.get("tool_use"))

    def render(
        self,
        chat: Conversation,
        *,
        max_chars: int | None = None,
        max_s: float = RENDER_S,
        max_work: int = MAX_WORK_CHARS,
    ) -> str:
        """Returns the prompt: all messages, and the start of the assistant's reply or the open last message.

        Args:
            chat: The conversation.
            max_chars: A longer prompt cannot fit the context; None is no limit.
            max_s: Longest time of the template, in seconds.
            max_work: Most characters that it may make, intermediate ones included.

        Raises:
            RequestError: The template refuses these messages, or a name of ``template_kwargs`` is reserved. The code
                is ``TOO_SLOW`` when a limit of time or work was exceeded.
            ContextLengthError: The prompt is longer than ``max_chars``.
        """
        self._check_names(chat.template_kwargs)
        if chat.has_later_system and not self.shows_later_system:
            chat = chat.with_reminders()
        if chat.has_errors and not self.shows_errors:
            chat = chat.with_errors_as_text()
        if chat.has_spoken_calls and not self.takes_spoken_calls:
            chat = chat.with_texts_as_thoughts()
        if chat.has_bare_tools and not self.takes_bare_tools:
            chat = chat.with_descriptions()
        text = self._text(chat, max_chars, RenderBudget(max_s, max_work))
        if chat.continue_final_message:
            text, end, _ = text.rpartition(_END)
            if not end:
                raise RequestError(
                    "the chat template does not show the last message, so that it cannot be continued.",
                    param="continue_final_message",
                )
        check_text(text, "messages")
        return text

    def _text(
        self, chat: Conversation, max_chars: int | None, budget: RenderBudget, thought_field: str | None = None
    ) -> str:
        """Renders a conversation as it is; an open last message ends with ``_END``."""
        messages = chat.messages
        if any(THOUGHT_FIELDS[0] in message for message in messages):
            messages = [_renamed(message, thought_field or self._thought_field) for message in messages]
        if chat.continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        variables = {
            **chat.template_kwargs,
            **self._special_tokens,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        template = self._tool_template if chat.tools else self._template
        return self._run(template, variables, max_chars, budget)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools of a request reach the prompt; True where the template refuses a plain conversation."""
        chat = Conversation(turns=(Turn("user", (Text("Hi"),)),), tools=[_TOOL])
        try:
            return PROBE in self.render(chat)
        except RequestError:
            return True

    @cached_property
    def _thought_field(self) -> str:
        """The field of a message in which the template looks for its thought."""
        user, saying = Turn("user", (Text("Hi"),)), Turn("assistant", (Thought(PROBE), Text("Yes")))
        calling = Turn("assistant", (Thought(PROBE), Text(""), Call(PROBE_ID, "look", "{}")))
        result = Turn("tool", (Result("123456789", "found"),))
        for field in THOUGHT_FIELDS:
            for turns in ((user, saying), (user, calling, result)):
                try:
                    if PROBE in self._text(Conversation(turns=turns), None, RenderBudget(RENDER_S), field):
                        return field
                except RequestError:
                    continue
        return THOUGHT_FIELDS[0]

    @cached_property
    def shows_errors(self) -> bool:
        """Whether the result of a failed call differs from another with its text."""
        turns = Turn("user", (Text("Hi"),)), Turn("assistant", (Text(""), Call(PROBE_ID, "look", "{}")))

        def text(*, is_error: bool) -> str:
            result = Turn("tool", (Result("123456789", "found", is_error),))
            return self._text(Conversation(turns=(*turns, result), tools=[_TOOL]), None, RenderBudget(RENDER_S))

        try:
            return text(is_error=True) != text(is_error=False)
        except RequestError:
            return False

    @cached_property
    def takes_spoken_calls(self) -> bool:
        """Whether a message may have a thought, a text and a call; True where the template refuses a call without text."""

        def turns(text: str) -> tuple[Turn, ...]:
            said = Turn("assistant", (Thought(PROBE), Text(text), Call(PROBE_ID, "look", "{}")))
            return Turn("user", (Text("Hi"),)), said, Turn("tool", (Result("123456789", "found"),))

        return self._takes(turns("Yes"), _TOOL) or not self._takes(turns(""), _TOOL)

    @cached_property
    def takes_bare_tools(self) -> bool:
        """Whether a tool may have no description; True where the template refuses tools with one."""
        bare = {"type": "function", "function": {"name": PROBE, "parameters": {}}}
        turns = (Turn("user", (Text("Hi"),)),)
        return self._takes(turns, bare) or not self._takes(turns, _TOOL)

    def _takes(self, turns: tuple[Turn, ...], tool: dict[str, Any]) -> bool:
        """Whether the template renders a conversation."""
        try:
            self._text(Conversation(turns=turns, tools=[tool]), None, RenderBudget(RENDER_S))
        except RequestError:
            return False
        return True

    @cached_property
    def shows_later_system(self) -> bool:
        """Whether a system turn after a turn of the user or the assistant is shown, and at its place."""
        return all(map(self._shows_turns, (("user", "system"), ("user", "assistant", "system", "user"))))

    def _shows_turns(self, roles: tuple[Role, ...]) -> bool:
        """Whether turns of these roles are shown in their order."""
        turns, at = tuple(Turn(role, (Text(PROBE + role),)) for role in roles), -1
        try:
            text = self._text(Conversation(turns=turns), None, RenderBudget(RENDER_S))
        except RequestError:
            return False
        for role in roles:
            at = text.find(PROBE + role, at + 1)
            if at < 0:
                return False
        return True

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: line {error.lineno}: {error}.") from None
        except (SyntaxError, RecursionError, MemoryError) as error:  # Python's, for the code that Jinja generates
            raise ModelError(f"the chat template is nested too deeply: {type(error).__name__}.") from None

    def _run(
        self, template: jinja2.Template, variables: dict[str, Any], max_chars: int | None, budget: RenderBudget
    ) -> str:
        parts, num_chars = [], 0
        try:
            for part in self._environment.stream(template, variables, budget):
                parts.append(part)
                num_chars += len(part)
                if max_chars is not None and num_chars > max_chars:
                    raise ContextLengthError(
                        f"the chat template makes more than {max_chars} characters of these messages, which cannot fit "
                        "the context. Shorten them.",
                        param="messages",
                    )
        except TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the chat template refuses these messages: {str(error)[:200]}",
                code=TOO_SLOW if isinstance(error, RenderBudgetError) else None,
                param="messages",
            ) from None
        return "".join(parts)

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in self._reserved or name.endswith(("_token", "_tokens")):
                raise RequestError(
                    f"chat_template_kwargs may not set {name[:100]}; it has its own place.",
                    param=f"chat_template_kwargs.{name[:100]}",
                )


def _renamed(message: Message, thought_field: str) -> Message:
    """Returns a message with its thought under another name."""
    return {thought_field if name == THOUGHT_FIELDS[0] else name: value for name, value in message.items()}


def _read_override(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--chat-template {str(path)!r} cannot be read: {error}.", param="chat_template") from None


def _read_sources(folder: Path, configured: Any) -> dict[str, str]:
    """Returns the sources of a model's templates by name; files override the configured ones."""
    paths = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    try:
        found = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
        if "default" not in found and configured is not None:
            given = msgspec.convert(configured, str | list[_Named])
            named = {"default": given} if isinstance(given, str) else {each.name: each.template for each in given}
            found = named | found
    except (OSError, ValueError) as error:  # no Unicode, or another type
        raise ModelError(f"the chat_template in {str(folder)!r} cannot be read: {error}.", param="model") from None
    return found


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
    """Reads a special token from a string or an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
