"""Tokenizer, chat template and encoders of one model, loaded the same way by the server, ``LLM`` and the benchmarks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiserve.config.options import Model
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.models.model_config import ModelConfig
from hiserve.text.abilities import Abilities
from hiserve.text.conversation import Conversation
from hiserve.text.prompt.encoder import PromptEncoder
from hiserve.text.prompt.reply_tokens import ReplyTokenCache, encode_chat
from hiserve.text.reader.buffer import Event
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.encoders import load_template
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Frontend:
    """Everything that converts a model's text to tokens and back.

    Attributes:
        tokenizer: The model's tokenizer.
        template: The chat template; None where the model has none.
        token_bytes: Bytes of every token, for detokenizers.
        default_sampling: Sampling values for fields that a request omits, by ``--sampling-defaults``.
        abilities: Read replies to conversations.
        reply_cache: Token ids of generated replies, for prompts that contain them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    token_bytes: TokenBytes
    default_sampling: SamplingParams
    abilities: Abilities
    reply_cache: ReplyTokenCache = field(default_factory=ReplyTokenCache)

    def prompt_encoder(self) -> PromptEncoder:
        """Returns a server's encoder, with its own threads and processes; the caller closes it."""
        return PromptEncoder(self.tokenizer, self.template, self.reply_cache)

    def encode_chat(self, chat: Conversation, namespace: bytes = b"") -> Int32Array:
        """Returns the ids of a conversation, remembered replies with the ids they had, int32 ``[n]``.

        Args:
            chat: The conversation.
            namespace: Digest that keeps tenants apart.

        Raises:
            RequestError: The model has no chat template, or it refuses the messages.
        """
        if self.template is None:
            raise RequestError("this model has no chat template; give a prompt.", param="messages")
        known = self.reply_cache.recall(namespace, chat)
        return encode_chat(chat, known, self.template, self.tokenizer, splices=self.reply_cache.splices)

    def remember(
        self,
        chat: Conversation,
        text: str,
        ids: Sequence[int],
        events: Sequence[Event] = (),
        namespace: bytes = b"",
    ) -> None:
        """Keeps the ids of a finished reply for the prompts that will contain it.

        Args:
            chat: The conversation that the reply answers.
            text: The reply as its reader received it.
            ids: All generated ids, end token included.
            events: Of the reply; empty if it is text alone.
            namespace: As given to ``encode_chat``.
        """
        self.reply_cache.remember(namespace, chat, text, self.tokenizer.without_hidden_end(ids), events)


def load_frontend(settings: Model, folder: Path, model: ModelConfig) -> Frontend:
    """Loads the tokenizer and the chat template from a model's folder.

    Raises:
        ConfigError: ``--chat-template`` cannot be read, or the template does not support ``--thoughts``.
        ModelError: The tokenizer or the chat template cannot be used.
    """
    tokenizer = Tokenizer.load(folder, model.eos_token_ids)
    override = None if settings.chat_template is None else Path(settings.chat_template)
    template = load_template(folder, model.architecture, override)
    uses_openais = settings.sampling_defaults == "openai"
    defaults = SamplingParams() if uses_openais else model.sampling_defaults.params()
    token_bytes = TokenBytes(tokenizer)
    keeps = settings.thoughts == "keep"
    abilities = Abilities(tokenizer, token_bytes, template, settings.reply_format, keeps_thoughts=keeps)
    end = abilities.template.turn_end
    ends = [tokenizer.decode([index], skip_hidden=False) for index in model.eos_token_ids]
    if end.strip() and not any(text and text in end for text in ends):
        logger.warning(
            "the chat template ends turns with %r, which has none of the model's end tokens (%s): replies may not end",
            end[:40],
            " ".join(ends),
        )
    return Frontend(tokenizer, template, token_bytes, defaults, abilities, ReplyTokenCache(row=abilities.format))
