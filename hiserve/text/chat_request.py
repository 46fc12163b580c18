"""What a chat request says: messages, tools, documents, and how the template is to render them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from hiserve.errors import RequestError
from hiserve.text.json_size import num_marks

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_SERVED = {
    "function_call": "use tool_calls",
    "audio": "use text",
    "refusal": "put it in the content",
}
PLAIN_FIELDS = ("name", "tool_call_id", "reasoning_content")
MAX_MESSAGES = 4096
MAX_PARTS = 16_384  # of the content of one message
MAX_FIELDS = 64  # of one message
MAX_TOOLS = 1024
# Of an object that a client passes through to the template, and of the arguments of all tool calls together.
MAX_DEPTH = 32
MAX_VALUES = 32_768
MAX_INT = 2**63 - 1


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the prompt of a conversation is made from.

    Attributes:
        messages: As ``parse_messages`` returns them.
        tools: OpenAI function tools, or None.
        documents: For templates that cite them, or None.
        template_kwargs: More variables for the template, by name.
        add_generation_prompt: End the prompt with the start of the assistant's reply.
        continue_final_message: End the prompt inside the last message, so that the model goes on with it.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_chars(self) -> int:
        """About how many characters a prompt has that shows everything."""
        framing = 16 * len(self.messages)
        contents = sum(len(message["content"]) for message in self.messages)
        more = [self.tools, self.documents, self.template_kwargs]
        return framing + contents + (len(json.dumps(more)) if any(more) else 0)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Reads the fields of a request that the chat template sees.

    ``tool_choice`` ``none`` leaves the tools out: a model that does not know them does not call them.
    ``continue_final_message`` is without a generation prompt, also when ``add_generation_prompt`` is not given.

    Args:
        body: The parsed body; other fields are left alone.

    Raises:
        RequestError: Something is malformed or not supported; ``param`` says where.
    """
    continues = _flag(body, "continue_final_message", default=False)
    adds_prompt = _flag(body, "add_generation_prompt", default=not continues)
    if continues and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false.",
            param="continue_final_message",
        )
    if body.get("chat_template") is not None:
        raise RequestError(
            "chat_template is not supported in a request; the operator sets it (--chat-template).",
            param="chat_template",
        )
    tools = _parse_tools(body.get("tools"))
    return ChatRequest(
        messages=parse_messages(body.get("messages")),
        tools=None if body.get("tool_choice") == "none" else tools,
        documents=_parse_documents(body.get("documents")),
        template_kwargs=_parse_kwargs(body.get("chat_template_kwargs")),
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
    )


def parse_messages(value: Any) -> list[Message]:
    """Checks the ``messages`` of a request and brings their contents to plain text.

    - A content is a string or a list of text parts, which are joined. A missing content of an assistant
      that calls tools is the empty text.
    - ``developer`` becomes ``system``.
    - The ``arguments`` of a tool call are a JSON text; templates expect the object that it spells. A text that
      does not spell an object (a model may have written it) stays a text.
    - Other fields of a message are kept where they are strings (``name``, ``tool_call_id``,
      ``reasoning_content``).

    Raises:
        RequestError: Something is malformed or not supported; ``param`` says where.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message.", param="messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(value)} entries; the most is {MAX_MESSAGES}.", param="messages")
    messages, num_values = [], 0
    for i, message in enumerate(value):
        num_values += sum(map(num_marks, _argument_texts(message)))
        if num_values > MAX_VALUES:
            raise RequestError(
                f"the arguments of the tool calls up to messages[{i}] have more than {MAX_VALUES} values. Send fewer.",
                param=f"messages[{i}].tool_calls",
            )
        messages.append(_parse_message(message, f"messages[{i}]"))
    return messages


def _argument_texts(message: Any) -> list[str]:
    """Returns the arguments of a message's tool calls where they are texts; the message may be malformed."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return [text for text in arguments if isinstance(text, str)]


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object with role and content.", param=where)
    if len(value) > MAX_FIELDS:
        raise RequestError(f"{where} has {len(value)} fields; the most is {MAX_FIELDS}.", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    for name, remedy in NOT_SERVED.items():
        if value.get(name):
            raise RequestError(f"{where}.{name} is not supported; {remedy}.", param=f"{where}.{name}")
    for name in PLAIN_FIELDS:
        if not isinstance(value.get(name), str | None):
            raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    message: Message = {name: text for name, text in value.items() if isinstance(text, str)}
    message["role"] = "system" if role == "developer" else role
    calls = _parse_tool_calls(value.get("tool_calls"), role, f"{where}.tool_calls")
    if calls and value.get("content") is None:
        message["content"] = ""
    else:
        message["content"] = _parse_content(value.get("content"), f"{where}.content")
    for name, text in message.items():
        check_text(name, where)
        check_text(text, f"{where}.{name[:100]}" if name in value else where)
    if calls:
        message["tool_calls"] = calls
    return message


def _parse_content(value: Any, where: str) -> str:
    return value if isinstance(value, str) else join_parts(value, where)


def join_parts(value: Any, where: str) -> str:
    """Joins the text parts of a content.

    Args:
        value: The content, where it is no string.
        where: Its place, for complaints.

    Raises:
        RequestError: It is no list of text parts.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    if len(value) > MAX_PARTS:
        raise RequestError(f"{where} has {len(value)} parts; the most is {MAX_PARTS}.", param=where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind[:100] if isinstance(kind, str) and kind.isidentifier() else "this part"
            raise RequestError(f"{where}[{i}]: {shown} is not supported; use text parts.", param=f"{where}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}].text must be a string.", param=f"{where}[{i}].text")
        texts.append(part["text"])
    return "".join(texts)


def _parse_tool_calls(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    if not value:
        return []
    if role != "assistant" or not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(
            f"{where} must be a list of at most {MAX_TOOLS} calls, in a message of the assistant.", param=where
        )
    return [_parse_tool_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _parse_tool_call(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise RequestError(f"{where} must be an object of type function.", param=f"{where}.type")
    if not isinstance(value.get("id"), str | None):
        raise RequestError(f"{where}.id must be a string.", param=f"{where}.id")
    function = _parse_function(value, where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON text.", param=f"{where}.function.arguments")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if value.get("id") is not None:
        call["id"] = value["id"]
    check_json(call, where)
    return call


def _parse_arguments(text: str) -> str | dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _parse_function(value: dict[str, Any], where: str) -> dict[str, Any]:
    function = value.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object with a name.", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a string.", param=f"{where}.function.name")
    return function


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} tools.", param="tools")
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f"{where} must be an object of type function.", param=f"{where}.type")
        function = _parse_function(tool, where)
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError(f"{where}.function.parameters must be an object.", param=f"{where}.function.parameters")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{where}.function.description must be a string.", param=f"{where}.function.description")
    check_json(value, "tools")
    return value


def _parse_documents(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
        raise RequestError("documents must be a list of objects.", param="documents")
    check_json(value, "documents")
    return value


def _parse_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    check_json(value, "chat_template_kwargs")
    return value


def _flag(body: dict[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{name} must be true or false.", param=name)
    return default if value is None else value


def check_json(value: Any, param: str) -> None:
    """Refuses parsed JSON that no template should walk through.

    Raises:
        RequestError: It is nested too deeply, has too many values, a text in it is not valid Unicode, or a whole number
            has more than 64 bits.
    """
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH):
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise RequestError(f"{param} has more than {MAX_VALUES} values.", param=param)
        for entry in level:
            if isinstance(entry, str):
                check_text(entry, param)
            elif isinstance(entry, int) and abs(entry) > MAX_INT:
                raise RequestError(f"{param} has a whole number of more than 64 bits.", param=param)
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [entry for part in inner for entry in part]
        level += [entry for part in inner if isinstance(part, dict) for entry in part.values()]
        if not level:
            return
    raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep.", param=param)


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
