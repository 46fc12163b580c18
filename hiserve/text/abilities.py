"""The abilities of a model in conversations, from its chat template and its tokenizer: how its replies are read."""

from __future__ import annotations

import secrets
import string
from functools import partial
from typing import NamedTuple

import msgspec

from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import ConfigError
from hiserve.text.conversation import Conversation
from hiserve.text.reader.formats import BY_NAME, NOTHING, Marks, find_format
from hiserve.text.reader.marks import ReplySyntax
from hiserve.text.reader.messages import ASSISTANT, FINAL
from hiserve.text.reader.output import ReplyOutput, TextOutput
from hiserve.text.reader.reader import Reader, ReplyStart
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.probes import TemplateAbilities, probe
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer

# Tokens at the end of a prompt that may contain the mark that opens a thought.
_TAIL = 16


class Thinking(NamedTuple):
    """A request's switches of thoughts. None, or a template without the switch, means the default of the template.

    Attributes:
        is_on: Whether the reply begins with a thought.
        effort: Its length, by a value of the model's family.
        keeps: Whether the prompt shows the thoughts of earlier turns.
        budget: Most tokens of the reply's thought.
    """

    is_on: bool | None = None
    effort: str | None = None
    keeps: bool | None = None
    budget: int | None = None


class ReplyMarks(NamedTuple):
    """The marks before the text of a reply.

    Attributes:
        opening: Of the thought with which it may begin; empty where it begins within one, or has none.
        after: That end the thought; empty where there is none.
        header: Of the message that has the text, where replies are messages.
    """

    opening: str = ""
    after: str = ""
    header: str = ""


NO_MARKS = ReplyMarks()


class Abilities:
    """The format of the replies of one model, and the abilities of its chat template.

    Args:
        tokenizer: Of the model.
        token_bytes: Of its tokens.
        template: Its chat template; None without one.
        reply_format: ``--reply-format``.
        keeps_thoughts: ``--thoughts keep``.

    Attributes:
        format: Of replies; None reads them as text.
        template: Abilities of the chat template.
        syntax: The format in the tokens of the model.

    Raises:
        ConfigError: The template cannot keep the thoughts of earlier turns.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_bytes: TokenBytes,
        template: ChatTemplate | None,
        reply_format: str = "auto",
        *,
        keeps_thoughts: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        source = "" if template is None else template.sources.source + (template.sources.tool_source or "")
        self.format = find_format(source) if reply_format == "auto" else BY_NAME.get(reply_format)
        self.template = TemplateAbilities() if template is None else probe(template)
        self._keeps_thoughts = keeps_thoughts
        if keeps_thoughts and not (self.template.keep_switch or self.template.thoughts == "always"):
            raise ConfigError(
                "--thoughts keep: the chat template drops the thoughts of earlier turns and has no switch for them. "
                "Leave the option out, or give another --chat-template.",
                param="thoughts",
            )
        is_named = reply_format != "auto"
        self.syntax = None if self.format is None else ReplySyntax(self.format, tokenizer, source, is_named=is_named)

    def prepared(self, chat: Conversation, thinking: Thinking) -> Conversation:
        """Returns the conversation with the variables that switch thoughts; those that the request set itself stay."""
        keeps = True if thinking.keeps is None and self._keeps_thoughts else thinking.keeps
        variables = self.template.variables(keep=keeps, thinking=thinking.is_on, effort=thinking.effort)
        if not variables:
            return chat
        return msgspec.structs.replace(chat, template_kwargs=variables | chat.template_kwargs)

    def output(self, chat: Conversation, prompt: Int32Array, sampling: SamplingParams) -> ReplyOutput:
        """Returns the reader of one reply to a conversation.

        Args:
            chat: The conversation.
            prompt: int32 ``[n]``.
            sampling: Of the reply.
        """
        syntax = self.syntax
        reads_calls = bool(chat.tools) and syntax is not None and syntax.row.reads_calls
        if syntax is None or not (reads_calls or syntax.thought[0]):
            return TextOutput(self._token_bytes, sampling)
        start = ReplyStart(
            tools=chat.tools if reads_calls else None,
            is_single=chat.is_single,
            is_thinking=self._is_thinking(chat, prompt),
            is_continued=chat.continue_final_message,
            call_id=partial(_call_id, syntax.row.id_length),
        )
        return Reader(syntax, self._token_bytes, sampling, start)

    def marks(self, chat: Conversation, prompt: Int32Array, *, is_free: bool = False) -> ReplyMarks:
        """Returns the marks before the text of the reply to a prompt.

        Args:
            chat: The conversation.
            prompt: int32 ``[n]``.
            is_free: The reply is any text: a thought may begin with a mark of text too.
        """
        syntax, (opening, closing) = self.syntax, self._thought
        if syntax is None or not opening:
            return NO_MARKS
        row, header = syntax.row, ""
        after = closing
        if row.header[0]:
            after += row.header_starts[0] + ASSISTANT
            header = f"{row.header[0]}{FINAL}{row.header[1]}"
        is_known = syntax.is_token(syntax.thought[0][:1])
        if self._is_thinking(chat, prompt):
            return ReplyMarks("", after, header)
        tail = self._tail(prompt)
        is_begun = tail.endswith(closing) or (header and not tail.endswith(row.header_starts[0] + ASSISTANT))
        if chat.continue_final_message or is_begun or not (is_known or is_free):
            return NO_MARKS
        return ReplyMarks(opening, after, header)

    @property
    def _thought(self) -> Marks:
        return NOTHING if self.syntax is None or not self.syntax.thought[0] else self.syntax.row.thought

    def _is_thinking(self, chat: Conversation, prompt: Int32Array) -> bool:
        """Whether a prompt ends within a thought."""
        opening, closing = self._thought
        if not opening:
            return False
        if chat.continue_final_message:
            tail = chat.turns[-1].text
            return tail.rfind(opening) > tail.rfind(closing)
        return self._tail(prompt).endswith(opening)

    def _tail(self, prompt: Int32Array) -> str:
        return self._tokenizer.decode(prompt[-_TAIL:], skip_hidden=False).rstrip()


def _call_id(length: int) -> str:
    """Returns a new id of ``length`` letters and digits; 0 means the default length."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(length)) if length else f"call_{secrets.token_hex(12)}"
